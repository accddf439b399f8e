"""Layers computed chunk by chunk are the layers: values and every gradient, and what is dealt to whom."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.attention import rotated
from deepspeed.sequence.fpdt_layer import FPDT_FFN, FPDT_Attention, FPDT_InputConstruct, FPDT_LogitsLoss
from tests.harness import on_ranks

TOKENS, BATCH, HEADS, KEY_HEADS, WIDTH, HIDDEN = 24, 2, 4, 2, 6, 10
CONFIG = SimpleNamespace(
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    num_key_value_heads=KEY_HEADS,
    kv_channels=WIDTH,
    attention_dropout=0.0,
)


def _dealt(whole, rank, size, chunk):
    """``[tokens, ...]``: this rank's part of every chunk."""
    return whole.unflatten(0, (-1, size, chunk // size))[:, rank].flatten(0, 1)


def test_what_is_dealt():
    tokens = torch.arange(16)[None].repeat(2, 1)
    found = []
    for rank in range(2):
        args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=8)
        mask = torch.ones(2, 16)
        made = FPDT_InputConstruct(tokens, tokens + 1, mask, None, tokens, args, 2, rank).generate()
        assert made[2] is mask and made[3] is None and torch.equal(made[1], made[0] + 1)
        assert torch.equal(made[4], made[0])
        found.append(made[0][0].tolist())
    assert found == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    with pytest.raises(DeepSpeedConfigError, match="16 tokens in chunks of 6 over 2 ranks"):
        args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=6)
        FPDT_InputConstruct(tokens, None, None, None, None, args, 2, 0)


def _dense(x, w1, b1, w2, b2, rotary):
    made = functional.linear(x, w1, b1).unflatten(-1, (-1, WIDTH))
    query, key, value = made.split([HEADS, KEY_HEADS, KEY_HEADS], dim=2)
    query, key = (rotated(part, *rotary, 0) for part in (query, key))
    inside = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    out = functional.scaled_dot_product_attention(*inside, is_causal=True, enable_gqa=True)
    return functional.linear(out.permute(2, 0, 1, 3).flatten(2), w2, b2)


def _whole():
    generator = torch.Generator().manual_seed(3)
    outer = (HEADS + 2 * KEY_HEADS) * WIDTH
    shapes = [(TOKENS, BATCH, HIDDEN), (outer, HIDDEN), (outer,), (HIDDEN, HEADS * WIDTH), (HIDDEN,)]
    return [torch.randn(shape, generator=generator) / 2 for shape in shapes]


@on_ranks(2)
def test_attention_and_loss() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    angle = torch.arange(float(TOKENS))[:, None] * torch.tensor([1.0, 0.3])
    rotary = tuple(
        torch.cat((angle, angle), -1).cos() if part == 0 else torch.cat((angle, angle), -1).sin() for part in (0, 1)
    )
    wanted_in = [tensor.requires_grad_() for tensor in _whole()]
    expected = _dense(*wanted_in, rotary)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weight).sum().backward()
    for chunk, return_bias, shape in (
        (8, True, (TOKENS, 4)),
        (12, False, (TOKENS, 1, 1, 4)),
        (100, False, (TOKENS, 4)),
    ):
        length = min(chunk, TOKENS)
        mine = [tensor.requires_grad_() for tensor in _whole()]
        mine[0] = _dealt(mine[0].detach(), rank, size, length).clone().requires_grad_()
        layer = FPDT_Attention(CONFIG, *mine[1:], dist.group.WORLD, return_bias=return_bias, chunk_size=chunk)
        assert not list(layer.parameters())
        found = layer(mine[0], None, None, tuple(part.view(shape) for part in rotary))
        if return_bias:
            assert found[1] is mine[4]
            found = found[0] + found[1]
        torch.testing.assert_close(found, _dealt(expected.detach(), rank, size, length), rtol=1e-5, atol=1e-5)
        (found * _dealt(weight, rank, size, length)).sum().backward()
        torch.testing.assert_close(
            mine[0].grad, _dealt(wanted_in[0].grad, rank, size, length), rtol=1e-5, atol=1e-5
        )  # fmt: skip
        for one, other in zip(mine[1:], wanted_in[1:], strict=True):
            gradient = one.grad.clone()
            dist.all_reduce(gradient)
            torch.testing.assert_close(gradient, other.grad, rtol=1e-5, atol=1e-5)
    for given, words in (
        ((torch.ones(1), None, None), "attention_mask is Tensor"),
        ((None, 1, None), "inference_params"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=words):
            layer(mine[0], *given)
    with pytest.raises(DeepSpeedConfigError, match="attention_dropout is 0.1"):
        FPDT_Attention(SimpleNamespace(**{**vars(CONFIG), "attention_dropout": 0.1}), *mine[1:], None)
    # The loss of all tokens.
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(6, BATCH, 8, generator=generator)
    labels = torch.randint(0, 11, (BATCH, 6), generator=generator)
    labels[1, 2] = -100
    words = torch.randn(11, 8, generator=generator)
    part = slice(rank * 3, rank * 3 + 3)
    given = [hidden[part].clone().requires_grad_(), words.clone().requires_grad_()]
    found = FPDT_LogitsLoss.apply(given[0], labels[:, part], given[1], rank, size, dist.group.WORLD, 2)
    whole = [hidden.clone().requires_grad_(), words.clone().requires_grad_()]
    expected = functional.cross_entropy((whole[0] @ whole[1].t()).permute(0, 2, 1), labels.t(), reduction="none")
    torch.testing.assert_close(found, expected)
    (found.sum() / size).backward()
    expected.sum().backward()
    torch.testing.assert_close(given[0].grad, whole[0].grad[part])
    with pytest.raises(DeepSpeedConfigError, match="spg_size is 3, but the group has 2 ranks"):
        FPDT_LogitsLoss.apply(given[0], labels[:, part], given[1], rank, 3, dist.group.WORLD, 2)


@pytest.mark.parametrize("add_bias", [True, False])
def test_the_mlp(add_bias):
    generator = torch.Generator().manual_seed(2)
    shapes = [(7, 2, 4), (9, 4), (9,), (4, 9), (4,)]
    given = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    x, w1, b1, w2, b2 = given
    out, left = FPDT_FFN.apply(*given, add_bias, 3)
    assert (left is None) == add_bias
    found = out if left is None else out + left
    expected = functional.linear(functional.gelu(functional.linear(x, w1, b1), approximate="tanh"), w2, b2)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.sin().sum(), given), torch.autograd.grad(expected.sin().sum(), given), strict=True
    ):
        torch.testing.assert_close(one, other)
