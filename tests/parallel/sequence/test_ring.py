"""Attention whose keys and values go round the ranks, or wait in host memory, is dense attention."""

import itertools
import threading

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import Mesh
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence import block_kernels, ring
from deepspeed.parallel.sequence.chunked import chunked_attention
from deepspeed.parallel.sequence.exchange import in_equal_parts
from deepspeed.parallel.sequence.ring import ring_attention, zigzag
from deepspeed.parallel.sequence.ulysses import _groups_of_mode
from tests.harness import on_ranks
from tests.harness.loopback import run_threads


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
    block_kernels._MASK_SIDE = tile
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


class _Operations(TorchDispatchMode):
    """Counts operations that make more than a number per query, without those of the network."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.counted, self.largest, self._is_sending = least, [], 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in (results if isinstance(results, tuple) else (results,)) if torch.is_tensor(x)]
        is_free = func.is_view or func.name().startswith(("aten::empty", "aten::new_empty", "aten::split"))
        if not self._is_sending and not is_free and max(sizes, default=0) >= self.least:
            self.counted.append(func.name())
            self.largest = max(self.largest, *sizes)
        return results

    def uncounted(self, function):
        def run(*args, **kwargs):
            self._is_sending = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_sending = False

        return run


def _count_of_layer(transport, transports, tokens, is_causal, dtype):
    """Returns the operations of forward and of backward, and the most elements that one of them makes."""
    transports[threading.current_thread()] = transport
    width, heads = 16, 2
    generator = torch.Generator().manual_seed(transport.rank)
    given = [torch.randn(1, n, tokens, width, generator=generator, dtype=dtype) for n in (heads, 1, 1)]
    found = []
    with _Operations(tokens * width // 2) as operations:
        send = operations.uncounted(transport.all_to_all)

        def all_to_all(*args, **kwargs):
            work = send(*args, **kwargs)
            work.wait = operations.uncounted(work.wait)
            return work

        transport.all_to_all = all_to_all
        out = ring_attention(*(x.requires_grad_() for x in given), None, is_causal=is_causal)
        found.append(list(operations.counted))
        out.sum().backward()
    return found[0], operations.counted[len(found[0]) :], operations.largest


@pytest.mark.parametrize(("is_causal", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_layer_has_few_operations_and_no_scores(is_causal, dtype, monkeypatch):
    transports = {}
    monkeypatch.setattr(ring, "transport_of", lambda *_: transports[threading.current_thread()])
    counts = {}
    for tokens in (128, 512):
        counts[tokens] = run_threads(_count_of_layer, 8, transports, tokens, is_causal, dtype)
    for forward, backward, _ in counts[128]:
        assert len(forward) <= 64 and len(backward) <= 64
    for few, many in zip(counts[128], counts[512], strict=True):
        assert few[:2] == many[:2] and many[2] == 4 * few[2] < 512 * 512 / 2  # linear in the tokens
