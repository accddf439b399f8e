"""Sums through memory that ranks of one host share."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.host import shared_sums as sums_of_host
from deepspeed.comm.host.shared_sums import same_host_sums
from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.channel import Channel
from deepspeed.errors import CommunicationError, DivergenceError
from tests.harness import run_ranks


def _summand(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def _expected(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    wide = dtype if dtype.itemsize > 2 else torch.float32
    total = _summand(0, numel, dtype, seed).to(wide)
    for rank in range(1, dist.get_world_size()):
        total += _summand(rank, numel, dtype, seed).to(wide)
    return total.to(dtype)


def _sums() -> None:
    rank = dist.get_rank()
    sums = same_host_sums(Job.current().axis_of().transport())
    assert sums is not None
    kinds = [(numel, dtype) for numel in (5, 1 << 19, 7, 0) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    for seed, (numel, dtype) in enumerate(kinds):  # places grow and shrink
        values = _summand(rank, numel, dtype, seed)
        found = sums.start(values, "a tensor").wait()
        assert torch.equal(found, _expected(numel, dtype, seed))
        assert found.data_ptr() == values.data_ptr()  # no more memory than the summand had
        offered = sums.place((numel,), dtype)
        offered.copy_(_summand(rank, numel, dtype, seed + 50))
        work = sums.start(offered, "what was computed there")
        if rank == 0:
            time.sleep(0.002)  # the other is ahead: it must not write where this one has not read
        assert torch.equal(work.wait(), _expected(numel, dtype, seed + 50))
        assert torch.equal(work.wait(), _expected(numel, dtype, seed + 50))
    # More on their way than there are places, waited for in another order on each rank.
    works = [sums.start(_summand(rank, 9, torch.float32, seed), "many") for seed in range(7)]
    for seed in sorted(range(7), key=lambda seed: (seed * (rank + 2)) % 7):
        assert torch.equal(works[seed].wait(), _expected(9, torch.float32, seed))
    # What was offered and not used is no summand.
    sums.place((2, 2), torch.float32).fill_(1.0)
    assert torch.equal(sums.start(torch.ones(4), "others").wait(), torch.full((4,), float(dist.get_world_size())))


@pytest.mark.parametrize("size", [2, 3])
def test_sums(size):
    run_ranks(_sums, size)


def _larger_ones() -> None:
    """Summands above the limit are gloo's, in between others."""
    before, sums_of_host.MOST = sums_of_host.MOST, 64
    try:
        transport = Job.current().axis_of().transport()
        channel = Channel(transport, same_host_sums(transport))
        for rows in (2, 40, 3):
            place = channel.place((rows, 4), torch.empty(0))
            place.fill_(dist.get_rank() + 1.0)
            assert torch.equal(channel.start_sum(place, "a sum").wait(), torch.full((rows, 4), 3.0))
    finally:
        sums_of_host.MOST = before


def test_large_sums_are_the_backends():
    run_ranks(_larger_ones, 2)


def _parted() -> None:
    transport = Job.current().axis_of().transport()
    sums = same_host_sums(transport)
    started = time.monotonic()
    with pytest.raises(DivergenceError, match="rank 0 waits for the output of a.*rank 1 waits for the other call"):
        if dist.get_rank() == 0:
            sums.start(torch.ones(3), "the output of a").wait()
        else:
            transport.gather_small(torch.ones(1), channel="call", label="the other call")
    assert time.monotonic() - started < 60
    with pytest.raises((DivergenceError, CommunicationError)):  # what is broken stays broken
        sums.start(torch.ones(3), "the output of b").wait()


def test_ranks_that_part_are_named():
    run_ranks(_parted, 2, fresh=True)


def _other_layers() -> None:
    """Sums of one size but of different things: gloo would have added them."""
    sums = same_host_sums(Job.current().axis_of().transport())
    mine = ("the output of a", "the output of b")[dist.get_rank()]
    text = "rank 0 sums the output of a .3 elements.*; rank 1 sums the output of b"
    with pytest.raises(DivergenceError, match=text):
        sums.start(torch.ones(3), mine).wait()
    with pytest.raises(CommunicationError, match="closed after an earlier failure"):
        sums.start(torch.ones(3), "the output of c").wait()


def test_sums_of_different_things_are_named():
    run_ranks(_other_layers, 2, fresh=True)


def _one_ends() -> None:
    sums = same_host_sums(Job.current().axis_of().transport())
    started = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(CommunicationError, match="waiting for the output of a failed; a peer has probably died"):
            sums.start(torch.ones(3), "the output of a").wait()
        assert time.monotonic() - started < 60
    else:
        sums.close()


def test_a_rank_that_is_gone_ends_the_wait():
    run_ranks(_one_ends, 2, fresh=True)
