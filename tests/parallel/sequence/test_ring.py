"""Attention whose keys and values go round the ranks, or wait in host memory, is dense attention."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import Mesh
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence import online
from deepspeed.parallel.sequence.chunked import chunked_attention
from deepspeed.parallel.sequence.exchange import in_equal_parts
from deepspeed.parallel.sequence.ring import ring_attention, zigzag
from deepspeed.parallel.sequence.ulysses import _groups_of_mode
from tests.harness import on_ranks


def test_a_mode_that_nothing_implements_is_refused():
    with pytest.raises(DeepSpeedConfigError, match='mode "striped": expected "ulysses", "ring" or "both"'):
        _groups_of_mode(Job.adopt(), None, None, Mesh((("sequence", 2),)), "striped")


def test_zigzag_balances_causal_work():
    for ranks in (2, 3, 8):
        dealt = [zigzag(rank, ranks) for rank in range(ranks)]
        assert sorted(chunk for pair in dealt for chunk in pair) == list(range(2 * ranks))
        assert len({sum(pair) for pair in dealt}) == 1


def _dense(query, key, value, is_causal, window, documents):
    places = torch.arange(query.size(2))
    after = places[:, None] - places
    seen = torch.ones(1, 1, *after.shape, dtype=torch.bool)
    if is_causal:
        seen = seen & (after >= 0) & (after < (window or 1000))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)


CASES = [
    (6, 2, True, None, False),
    (3, 3, False, None, False),
    (5, 1, True, 5, False),
    (4, 2, True, None, True),
]


def _whole(heads, key_heads, tokens=24):
    generator = torch.Generator().manual_seed(heads)
    shapes = [(2, count, tokens, 4) for count in (heads, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("ranks", "tile"), [(2, 5), (4, 1024), (1, 7)])
@on_ranks()
def test_the_ring_is_dense_attention(tile) -> None:
    online._TILE = tile
    rank, size = dist.get_rank(), dist.get_world_size()
    documents = torch.tensor([0] * 7 + [1] * 11 + [2] * 6).expand(2, -1).clone()
    documents[1, :12] = 1
    # Tokens that the ranks divide into halves, into odd parts, and into one each.
    for number, tokens in itertools.product(range(len(CASES)), (24, 3 * size, size)):
        heads, key_heads, is_causal, window, has_documents = CASES[number]
        whole = _whole(heads, key_heads, tokens)
        given = documents[:, :tokens] if has_documents else None
        expected = _dense(*whole, is_causal, window, given)
        weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        wanted = torch.autograd.grad((expected * weight).sum(), whole)
        start, stop = in_equal_parts(tokens, size)[rank]
        mine = [x.detach()[:, :, start:stop].clone().requires_grad_() for x in whole]
        found = ring_attention(*mine, dist.group.WORLD, documents=given, is_causal=is_causal, window=window)
        torch.testing.assert_close(found, expected.detach()[:, :, start:stop], rtol=1e-5, atol=1e-5)
        (found * weight[:, :, start:stop]).sum().backward()
        for x, gradient in zip(mine, wanted, strict=True):
            torch.testing.assert_close(x.grad, gradient[:, :, start:stop], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_chunks_from_host_memory_are_dense_attention(chunk_size):
    for heads, key_heads, is_causal, window, _ in CASES[:3]:
        whole = _whole(heads, key_heads)
        expected = _dense(*whole, is_causal, window, None)
        weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        wanted = torch.autograd.grad((expected * weight).sum(), whole)
        found = chunked_attention(*whole, chunk_size=chunk_size, is_causal=is_causal, window=window)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for one, other in zip(torch.autograd.grad((found * weight).sum(), whole), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    with pytest.raises(DeepSpeedConfigError, match="at least 1 token"):
        chunked_attention(*whole, chunk_size=0)


def test_no_tokens_in_chunks():
    query = torch.randn(2, 4, 0, 8, requires_grad=True)
    found = chunked_attention(query, query[:, :2], query[:, :2])
    assert found.shape == query.shape
    found.sum().backward()
    assert query.grad.shape == query.shape
