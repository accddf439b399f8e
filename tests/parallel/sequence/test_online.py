"""Attention by blocks of keys is whole attention, whichever kernel computes the blocks."""

import pytest
import torch
from torch.nn import functional

from deepspeed.parallel.sequence import block_kernels
from deepspeed.parallel.sequence.block_kernels import sum_dtype
from deepspeed.parallel.sequence.online import MaskRule, Rows, Slopes, Tokens, add_at

aten = torch.ops.aten
CASES = [  # heads, key heads, widths, causal, window, documents, where chunks of keys begin
    (4, 2, (64, 64), True, None, False, (0, 32, 64)),
    (2, 2, (128, 128), False, None, False, (0, 5, 64)),
    (3, 1, (7, 12), True, None, False, (0, 1, 30, 77)),
    (2, 1, (16, 16), True, 9, False, (0, 33, 50)),
    (2, 2, (5, 3), True, 40, True, (0, 20, 21, 64)),
    (4, 2, (8, 8), False, None, True, (0, 50)),
]
TOKENS = 96


def _flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    assert not any(x.size(-1) % 8 or x.stride(-1) != 1 or x.size(-1) != query.size(-1) for x in (query, key, value))
    assert not is_causal or query.size(2) == key.size(2)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, scale=scale)
    number = torch.empty(0)
    return out, lse, None, None, query.size(2), key.size(2), number, number, number


def _flash_backward(gradient, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, dropout, is_causal, *_, scale):
    assert (cum_q, cum_k, max_q, max_k) == (None, None, query.size(2), key.size(2)) and lse.is_contiguous()
    assert not any(x.size(-1) % 8 or x.stride(-1) != 1 for x in (gradient, query, key, value, out))
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, out, lse, dropout, is_causal, scale=scale
    )


@pytest.fixture(params=["cpu", "flash", "small"])
def kernel(request, monkeypatch):
    """``flash``: the operations for GPUs, with their own schemas, computed by those for CPUs."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        if request.param != "cpu":
            monkeypatch.setattr(block_kernels, "_kernel_of", lambda *given: "small" if given[-1] else request.param)
            monkeypatch.setattr(block_kernels, "_TILE_SIDE", 17)
            library.impl("_scaled_dot_product_flash_attention", _flash, "CPU")
            library.impl("_scaled_dot_product_flash_attention_backward", _flash_backward, "CPU")
        yield request.param


def _inputs(heads, key_heads, widths, dtype):
    generator = torch.Generator().manual_seed(heads)
    shapes = ((heads, widths[0]), (key_heads, widths[0]), (key_heads, widths[1]), (heads, widths[1]))
    return [torch.randn(2, n, TOKENS, width, generator=generator).to(dtype) for n, width in shapes]


def _documents():
    documents = torch.tensor([0] * 30 + [1] * 40 + [2] * 20 + [-1] * 6).repeat(2, 1)
    documents[1, :50] = 0
    return documents


def _whole(query, key, value, gradient, is_causal, window, documents):
    after = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    seen = ((after >= 0) & (after < (window or TOKENS)) if is_causal else torch.ones_like(after).bool())[None, None]
    if documents is not None:
        theirs = documents[:, None, None]
        seen = seen & (documents[:, None, :, None] == theirs) & (theirs >= 0)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    scores = (leaves[0] @ leaves[1].repeat_interleave(query.size(1) // key.size(1), 1).mT) / query.size(-1) ** 0.5
    shares = functional.softmax(scores.masked_fill(~seen, float("-inf")), -1).nan_to_num()
    out = shares @ leaves[2].repeat_interleave(query.size(1) // key.size(1), 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def _by_blocks(query, key, value, gradient, is_causal, window, documents, starts):
    rule, tokens = MaskRule(is_causal, window, query.size(-1) ** -0.5), Tokens(torch.arange(TOKENS), documents)
    chunks = [slice(a, b) for a, b in zip(starts, (*starts[1:], TOKENS), strict=True)]
    rows = Rows.of(query, value.size(-1))
    for chunk in reversed(chunks):
        rows.see(key[:, :, chunk], value[:, :, chunk], tokens, tokens.cut(chunk), rule)
    out, lse = rows.result()
    slopes = Slopes(query, gradient, out, lse)
    whole = [torch.zeros_like(x, dtype=sum_dtype(x)) for x in (key, value)]
    for chunk in chunks:
        for keys, found in slopes.see(key[:, :, chunk], value[:, :, chunk], tokens, tokens.cut(chunk), rule):
            add_at(keys, found, [x[:, :, chunk] for x in whole])
    return [out, *(x.to(query.dtype) for x in (slopes.of_query, *whole))]


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_whole_attention(case, kernel, monkeypatch):
    *shapes, is_causal, window, has_documents, starts = case
    rule = is_causal, window, _documents() if has_documents else None
    monkeypatch.setattr(block_kernels, "_MASK_SIDE", 40)
    for dtype, limit in ((torch.float32, 2e-6), (torch.float64, 1e-14)):
        given = _inputs(*shapes, dtype)
        exact = _whole(*(x.double() for x in given), *rule)
        for found, right in zip(_by_blocks(*given, *rule, starts), exact, strict=True):
            assert found.dtype == dtype and (found - right).abs().max() <= limit * right.abs().max()


@pytest.mark.parametrize("case", CASES[:2])
def test_blocks_in_16_bits_are_as_exact_as_the_kernel(case):
    *shapes, is_causal, _, _, starts = case
    given = _inputs(*shapes, torch.bfloat16)
    exact = _whole(*(x.double() for x in given), is_causal, None, None)
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    out = functional.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
    fused = [out, *torch.autograd.grad(out, leaves, given[3])]
    by_blocks = _by_blocks(*given, is_causal, None, None, starts)
    for found, other, right in zip(by_blocks, fused, exact, strict=True):
        assert (found.double() - right).norm() <= 1.3 * (other.double() - right).norm()
