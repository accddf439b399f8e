"""What ranks of one host hand each other through memory that they share."""

import gc
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.base.counters import counted
from deepspeed.comm.base.recorder import log
from deepspeed.comm.host import shared_exchange, sockets
from deepspeed.comm.host.shared_exchange import SameHostTransport, SharedMemorySumBackend, same_host_sums
from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import CommunicationError, DivergenceError
from tests.harness import RanksFailed, on_ranks, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)


def _values(round_: int, source: int, target: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    draws = torch.Generator().manual_seed(1000 * round_ + 10 * source + target)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (numel,), generator=draws).to(dtype)


def _in_tensors(flat: torch.Tensor, draws: random.Random) -> list[torch.Tensor]:
    """The same elements in tensors of any strides, as rows of one width or of none."""
    width = draws.choice((1, 2, 3))
    if draws.random() < 0.3 or flat.numel() % width:
        return list(flat.split(max(flat.numel() // 2, 1)))
    rows = torch.stack((flat.view(-1, width), torch.zeros_like(flat).view(-1, width)), dim=1)[:, 0]
    return list(rows.split(draws.randint(1, 5))) if len(rows) else []


def _places(numel: int, dtype: torch.dtype, draws: random.Random) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    tensors = _in_tensors(torch.zeros(numel, dtype=dtype), draws)
    return tensors, [tensor.reshape(-1) for tensor in tensors]


def _exchanges(large: int) -> None:
    before, shared_exchange.MOST = shared_exchange.MOST, large
    try:
        _rounds()
    finally:
        shared_exchange.MOST = before


def _rounds() -> None:
    """Many rounds of which any rank may be late, two at a time in flight, waited for in any order."""
    transport = Job.adopt().axis_of().transport()
    assert isinstance(transport, SameHostTransport)
    rank, size = transport.rank, transport.size
    shapes, own, late = random.Random(size), random.Random(rank), random.Random(77 + rank)
    pending = []
    for round_ in range(60):
        dtype = shapes.choice(DTYPES)
        most = shapes.choice((0, 1, 5, 40, 40, 3000))
        numels = [[shapes.choice((0, shapes.randint(0, most))) for _ in range(size)] for _ in range(size)]
        sent, received = numels[rank], [row[rank] for row in numels]
        flats = [_values(round_, rank, target, numel, dtype) for target, numel in enumerate(sent)]
        expected = torch.cat([_values(round_, source, rank, numel, dtype) for source, numel in enumerate(received)])
        like = torch.empty(0, dtype=dtype)
        if late.random() < 0.2:
            time.sleep(late.random() * 0.01)
        kind = shapes.randrange(3)
        if kind == 0:
            out = torch.empty(sum(received), dtype=dtype)
            work, found = transport.all_to_all(torch.cat(flats), sent, out, received, label="flat"), [out]
        else:
            arriving = [list(torch.zeros(numel, dtype=dtype)[None]) for numel in received]
            if kind == 1:
                leaving = [_in_tensors(flat, own) for flat in flats]
                arriving = [_places(numel, dtype, own)[0] for numel in received]
                leaving[rank], arriving[rank] = [flats[rank]], [torch.zeros(received[rank], dtype=dtype)]
            else:
                others = [flat for target, flat in enumerate(flats) if target != rank]
                staging_buffer = transport.staging_buffer(sum(flat.numel() for flat in others), like, label="tensors")
                places = iter(staging_buffer.split([flat.numel() for flat in others]))
                leaving = [[flats[rank]] if target == rank else [next(places)] for target in range(size)]
                for part, flat in zip((p for t, p in enumerate(leaving) if t != rank), others, strict=True):
                    part[0].copy_(flat)
            work = transport.exchange(leaving, arriving, like, label="tensors")
            found = [tensor for part in arriving for tensor in part]
        pending.append((work, found, expected))
        while len(pending) > shapes.randrange(3):
            work, found, expected = pending.pop(own.randrange(len(pending)))
            if late.random() < 0.2:
                time.sleep(late.random() * 0.01)  # the others are ahead: they must not write where this one reads
            work.wait()
            work.wait()
            assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in found] or [expected[:0]]), expected), round_


@pytest.mark.parametrize(("size", "large"), [(2, 2**26), (3, 600), (4, 2**26)])
def test_everything_arrives_whoever_is_late(size, large):
    """``large``: bytes from which on gloo takes over, for some ranks and not for others."""
    run_ranks(_exchanges, size, large)


@on_ranks(3)
def test_ranks_that_get_nothing_wait_for_nobody() -> None:
    """Rank 0 tells, nobody answers, and nobody hears rank 2: no queue fills."""
    transport = Job.adopt().axis_of().transport()
    for round_ in range(600):
        sent = [0, 3, 0] if transport.rank == 0 else [0, 0, 0]
        received = [3, 0, 0] if transport.rank == 1 else [0, 0, 0]
        out = torch.zeros(sum(received))
        transport.all_to_all(torch.full((sum(sent),), float(round_)), sent, out, received, label="one way").wait()
        assert torch.equal(out, torch.full_like(out, float(round_)))


@on_ranks(2)
def test_modes_of_autograd_do_not_matter() -> None:
    """Inside and outside inference mode, of tensors that want a gradient; the bytes are counted once."""
    transport = Job.adopt().axis_of().transport()
    transport.staging_buffer(0, torch.empty(0), label="a tensor")  # now they know each other
    source = torch.arange(6.0).requires_grad_()
    for mode in (torch.inference_mode(), torch.enable_grad(), torch.inference_mode()):
        with mode, counted() as traffic:
            out = torch.zeros(6)
            transport.all_to_all(source, [3, 3], out, [3, 3], label="a tensor").wait()
        mine = torch.arange(6.0)[3 * transport.rank :][:3]
        assert torch.equal(out, mine.repeat(2))
        assert traffic.requested["all_to_all"].nbytes == traffic.ran["send"].nbytes == 12


@on_ranks(2)
def test_ranks_of_several_hosts_use_the_backend() -> None:
    """Ranks of different hosts, or without such memory on one of them, exchange over gloo."""
    rank = dist.get_rank()
    before = sockets._host, os.memfd_create

    def refused(_name: str, _flags: int) -> int:
        raise PermissionError("no memfd_create in this container")

    for spoil in ("host", "memory"):
        try:
            if spoil == "host":
                sockets._host = lambda: f"host {rank}"
            elif rank == 0:
                sockets._MEETING, os.memfd_create = 0.5, refused
            else:
                sockets._MEETING = 0.5
            transport = Job.adopt().axis_of().transport()
            x, places = torch.arange(4.0).view(2, 2) + 10 * rank, torch.zeros(2, 3)
            leaving, arriving = [[x[:, 0]], [x[:, 1]]], [[places[:, 0]], [places[:, 2]]]
            transport.exchange(leaving, arriving, x, label="columns").wait()
            assert torch.equal(places, torch.tensor([[0.0, -rank, 10.0], [2.0, -rank, 12.0]]) + rank)
            assert transport._host is None
        finally:
            sockets._host, os.memfd_create = before
            sockets._MEETING = 10.0


def _exchange(transport: Transport, numels: Sequence[int], label: str) -> None:
    sent, received = [0, 0], [0, 0]
    sent[1 - transport.rank], received[1 - transport.rank] = numels
    transport.all_to_all(torch.ones(numels[0]), sent, torch.empty(numels[1]), received, label=label).wait()


@pytest.mark.parametrize("first", ["", "what both do"])
@on_ranks(2, fresh=True)
def test_exchanges_of_different_things_are_named(first: str) -> None:
    transport = Job.adopt().axis_of().transport()
    if first:
        _exchange(transport, (2, 2), first)
    label = ("the tokens of a", "the tokens of b")[transport.rank]
    with pytest.raises(DivergenceError, match="rank 0 exchanges the tokens of a .*rank 1 exchanges the tokens of b"):
        _exchange(transport, (2, 2), label)
    transport.watch._patience = 0.0
    with pytest.raises((CommunicationError, DivergenceError)):
        _exchange(transport, (2, 2), "what is broken stays broken")


@on_ranks(2, fresh=True)
def test_counts_that_do_not_match_are_named() -> None:
    transport = Job.adopt().axis_of().transport()
    if transport.rank == 0:
        with pytest.raises(DivergenceError, match="rank 0 exchanges.* expects 16 bytes of it where 12 come"):
            _exchange(transport, (2, 4), "tokens")
    else:
        transport.watch._patience = 0.0
        with pytest.raises((DivergenceError, CommunicationError)):
            _exchange(transport, (3, 2), "tokens")
            _exchange(transport, (3, 2), "tokens")


@on_ranks(2, fresh=True)
def test_ranks_that_wait_in_vain_are_named() -> None:
    transport = Job.adopt().axis_of().transport()
    _exchange(transport, (2, 2), "what both do")
    started = time.monotonic()
    with pytest.raises(DivergenceError, match="rank 0 waits for the tokens.*rank 1 waits for another call"):
        if transport.rank == 0:
            _exchange(transport, (2, 2), "the tokens")
        else:
            transport.gather_small(torch.ones(1), channel="call", label="another call")
    assert time.monotonic() - started < 60


def _killed(folder: str) -> None:
    """A rank is killed between the rounds of an exchange."""
    transport = Job.adopt().axis_of().transport()
    _exchange(transport, (1 << 16, 1 << 16), "what both do")
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(CommunicationError, match="process of rank 1 has died .* while rank 0 waits for the tokens"):
        _exchange(transport, (2, 2), "the tokens")
    assert time.monotonic() - started < 60
    with open(f"{folder}/named", "w"):
        pass


def test_a_rank_that_is_killed_ends_the_wait(tmp_path):
    with pytest.raises(RanksFailed):
        run_ranks(_killed, 2, str(tmp_path), fresh=True)
    assert (tmp_path / "named").exists()


@on_ranks(2, fresh=True)
def test_memory_that_cannot_be_had() -> None:
    """Memory that cannot be had is named by the rank that wants it, and no other rank hangs."""
    transport = Job.adopt().axis_of().transport()
    _exchange(transport, (2, 2), "what both do")
    if transport.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with pytest.raises(CommunicationError, match=r"4194304 bytes of shared memory.*ulimit -f"):
            _exchange(transport, (1 << 20, 2), "tokens")
        transport._host.close()  # as its end does
    else:
        transport.watch._patience = 0.0
        with pytest.raises(CommunicationError, match="waiting for tokens failed"):
            _exchange(transport, (2, 1 << 20), "tokens")


@on_ranks(2, fresh=True)
def test_a_wait_ends_at_the_time_limit() -> None:
    """A wait ends at the time limit of the group, as gloo's would."""
    transport = Job.adopt().connector.over(dist.new_group([0, 1], timeout=timedelta(seconds=1.5)), None)
    _exchange(transport, (2, 2), "what both do")
    transport.watch._patience = 0.0
    if transport.rank == 0:
        with pytest.raises(CommunicationError, match="rank 1 of the group sent nothing within the group's time limit"):
            _exchange(transport, (2, 2), "tokens")
    dist.barrier()


@on_ranks(4, fresh=True)
def test_groups_at_once_and_a_fork() -> None:
    """Exchanges in three groups at once, one of all ranks, beside a process that was forked from this one."""
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    far = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    transports = [Job.adopt().connector.over(group, None) for group in (dist.group.WORLD, pairs, far)]
    child = 0
    for round_ in range(20):
        if round_ == 3:
            child = os.fork()
            if child == 0:  # a data loader's worker, say
                time.sleep(0.05)
                os._exit(0)
        works = []
        for number, transport in enumerate(transports):
            numels = [round_ + 1] * transport.size
            source = torch.full((sum(numels),), float(100 * number + rank + round_))
            out = torch.empty(sum(numels))
            works.append((transport.all_to_all(source, numels, out, numels, label=f"group {number}"), out, number))
        for work, out, number in works if rank % 2 else reversed(works):
            work.wait()
            ranks = transports[number].ranks
            expected = torch.tensor([100.0 * number + other + round_ for other in ranks])
            assert torch.equal(out, expected.repeat_interleave(round_ + 1))
    os.waitpid(child, 0)
    dist.barrier()
    # What is let go is closed.
    open_before = len(os.listdir("/proc/self/fd"))
    del transports, transport, works, work
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= open_before - 2 * (3 + 1 + 1) - (3 + 1 + 1)


@on_ranks(2, fresh=True)
def test_exchanges_are_logged_once() -> None:
    """The communication log has one line for an exchange, through memory or over gloo."""
    before = sockets._host
    for place in ("one host", "several"):
        transport = Job.adopt().axis_of().transport()
        sockets._host = before if place == "one host" else (lambda: f"host {dist.get_rank()}")
        log.enabled, log.prof_all, log.totals = True, True, {}
        try:
            _exchange(transport, (2, 2), "tokens")
            x = torch.arange(4.0)
            transport.exchange([[x[:2]], [x[2:]]], [[x.new_empty(2)], [x.new_empty(2)]], x, label="tensors").wait()
            exchanges = [(size, len(found.seconds)) for name, size, found in log.rows() if name == "all_to_all_single"]
            assert exchanges == [(8, 1), (16, 1)], (place, exchanges)
        finally:
            sockets._host = before
            log.enabled, log.totals = False, {}


_KEPT: list[
    tuple[Transport, SharedMemorySumBackend]
] = []  # as what a tensor's graph keeps, which no collector sees through


def _job_whose_transports_stay() -> tuple[int, int]:
    transport = Job.adopt().axis_of().transport()
    _exchange(transport, (2, 2), "tokens")
    sums = same_host_sums(Job.adopt().axis_of().transport())
    assert sums is not None
    sums.start(torch.ones(3), "a sum").wait()
    _KEPT.append((transport, sums))
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _use_of_former_jobs() -> None:
    assert len(_KEPT) == 4
    for transport, sums in _KEPT:
        with pytest.raises(CommunicationError, match="new engine"):
            _exchange(transport, (2, 2), "tokens")
        with pytest.raises(CommunicationError, match="new engine"):
            sums.start(torch.ones(3), "a sum")
        with pytest.raises(CommunicationError, match="new engine"):
            transport.gather_small(torch.zeros(1), channel="call", label="a call")
    _KEPT.clear()


def test_what_is_left_of_a_job_holds_no_memory_sockets_or_threads():
    found = [run_ranks(_job_whose_transports_stay, 2) for _ in range(4)]
    for *before, last in zip(*found, strict=True):  # a descriptor that is only open for a moment may be missed once
        assert all(now <= max(then) for now, then in zip(last, zip(*before, strict=True), strict=True)), found
    run_ranks(_use_of_former_jobs, 2)


_BEGUN: list[Callable[[], object]] = []  # what is left to do of exchanges and sums


def _job_that_ends_between() -> None:
    transport = Job.adopt().axis_of().transport()
    _BEGUN.append(transport.all_to_all(torch.ones(4), (2, 2), torch.empty(4), (2, 2), label="tokens").wait)
    sums, others = (
        same_host_sums(Job.adopt().axis_of().transport()),
        same_host_sums(Job.adopt().axis_of().transport()),
    )
    assert sums is not None and others is not None
    _BEGUN.append(sums.start(torch.ones(3), "tokens").wait)
    summand = others.place((3,), torch.float32)
    _BEGUN.append(lambda: others.start(summand, "tokens"))


def _ends_of_former_jobs() -> None:
    assert len(_BEGUN) == 3
    for rest in (*_BEGUN, *_BEGUN[:2]):  # no wait does at the second attempt either
        with pytest.raises(
            CommunicationError, match="tokens.*: the process group of this belongs to a job that is over"
        ):
            rest()
    _BEGUN.clear()


def test_what_a_job_has_begun_cannot_be_ended_after_it():
    run_ranks(_job_that_ends_between, 2)
    run_ranks(_ends_of_former_jobs, 2)


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
    sums = same_host_sums(Job.adopt().axis_of().transport())
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
    # More in flight than there are places, waited for in another order on each rank.
    works = [sums.start(_summand(rank, 9, torch.float32, seed), "many") for seed in range(7)]
    for seed in sorted(range(7), key=lambda seed: (seed * (rank + 2)) % 7):
        assert torch.equal(works[seed].wait(), _expected(9, torch.float32, seed))
    # What was offered and not used is no summand.
    sums.place((2, 2), torch.float32).fill_(1.0)
    assert torch.equal(sums.start(torch.ones(4), "others").wait(), torch.full((4,), float(dist.get_world_size())))


@pytest.mark.parametrize("size", [2, 3])
def test_sums(size):
    run_ranks(_sums, size)


@on_ranks(2)
def test_large_sums_are_the_backends() -> None:
    """Summands above the limit are gloo's, in between others."""
    before, shared_exchange.MOST = shared_exchange.MOST, 64
    try:
        transport = Job.adopt().axis_of().transport()
        channel = Channel(transport, same_host_sums(transport))
        for rows in (2, 40, 3):
            place = channel.place((rows, 4), torch.empty(0))
            place.fill_(dist.get_rank() + 1.0)
            assert torch.equal(channel.start_sum(place, "a sum").wait(), torch.full((rows, 4), 3.0))
    finally:
        shared_exchange.MOST = before


@on_ranks(2, fresh=True)
def test_what_is_sent_is_staged_in_shared_memory_up_to_the_limit() -> None:
    before, shared_exchange.MOST = shared_exchange.MOST, 64
    try:
        transport = Job.adopt().axis_of().transport()
        assert isinstance(transport, SameHostTransport)
        for numel, is_shared in ((16, True), (17, False)):
            place = transport.staging_buffer(numel, torch.empty(0), label="tensors")
            assert (place is transport._offered) is is_shared and place.numel() == numel
    finally:
        shared_exchange.MOST = before


@on_ranks(2, fresh=True)
def test_ranks_that_part_are_named() -> None:
    transport = Job.adopt().axis_of().transport()
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


@on_ranks(2, fresh=True)
def test_sums_of_different_things_are_named() -> None:
    """Sums of one size but of different things: gloo would have added them."""
    transport = Job.adopt().axis_of().transport()
    sums = same_host_sums(transport)
    mine = ("the output of a", "the output of b")[dist.get_rank()]
    text = "rank 0 sums the output of a .3 elements.*; rank 1 sums the output of b"
    with pytest.raises(DivergenceError, match=text):
        sums.start(torch.ones(3), mine).wait()
    transport.watch._patience = 0.0
    with pytest.raises(CommunicationError, match="closed after an earlier failure"):
        sums.start(torch.ones(3), "the output of c").wait()


@on_ranks(2, fresh=True)
def test_the_wait_ends_if_a_rank_has_left() -> None:
    transport = Job.adopt().axis_of().transport()
    sums = same_host_sums(transport)
    transport.watch._patience = 0.0
    started = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(CommunicationError, match="waiting for the output of a failed; a peer has probably died"):
            sums.start(torch.ones(3), "the output of a").wait()
        assert time.monotonic() - started < 60
    else:
        sums.close()
