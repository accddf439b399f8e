"""Short messages between ranks of one host."""

import gc
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.base.counters import counted
from deepspeed.comm.host import message_queue as queue_module
from deepspeed.comm.host import sockets
from deepspeed.comm.host.message_queue import LONGEST, MessageQueue
from deepspeed.comm.host.sockets import connect_on_host
from deepspeed.comm.job.connect import open_message_queue, warm_up
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import CommunicationError, DivergenceError
from deepspeed.parallel.pipe.channel import StageChannels
from tests.harness import RanksFailed, on_ranks, run_ranks

SOON = 60.0  # seconds, on a busy machine


@contextmanager
def mails(size: int, seconds: float = SOON) -> Iterator[list[MessageQueue]]:
    """Those of so many ranks, all in this process; what they hold must be closed in the end."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ends[low][high], ends[high][low] = pair
            for end in pair:
                limit = timedelta(seconds=seconds)
                end.setsockopt(
                    socket.SOL_SOCKET,
                    socket.SO_RCVTIMEO,
                    int(seconds).to_bytes(8, "little") + limit.microseconds.to_bytes(8, "little"),
                )
    made = [MessageQueue(connections, seconds) for connections in ends]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            yield made
    finally:
        for each in made:
            each.leave()
    assert all(end.fileno() == -1 for connections in ends for end in connections.values())
    assert not any(thread.name == "deepspeed-send" for thread in threading.enumerate())


def receive_bytes(queue: MessageQueue, peer: int, tag: int, length: int) -> bytes:
    buffer = bytearray(length)
    queue.take(peer, tag, memoryview(buffer))
    return bytes(buffer)


def filled(queue: MessageQueue, peer: int, tag: int, more: int = 5) -> int:
    """Sends messages until there is no room, and some more; how many."""
    count = 0
    while more:
        queue.post(peer, tag, count.to_bytes(4, "little") * (LONGEST // 4))
        count += 1
        more -= peer in queue._senders
    return count


def at_once(*actions: Callable[[], Any]) -> list[Any]:
    """What each returns, or raises; all must end soon."""
    results: list[Any] = [None] * len(actions)

    def run(number: int) -> None:
        try:
            results[number] = actions[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_messages_of_one_tag_keep_their_order_and_tags_never_mix():
    lengths = (0, 1, 7, 4096, LONGEST)
    with mails(3) as (one, two, three):
        for round_ in range(3):
            for tag in (5, -1, 1 << 40):
                for length in lengths:
                    one.post(1, tag, bytes([round_ + 3 * (tag % 7)]) * length)
        three.post(1, 5, b"from another rank")
        assert receive_bytes(two, 2, 5, 17) == b"from another rank"
        for tag in (1 << 40, 5, -1):
            for round_ in range(3):
                for length in lengths:
                    assert receive_bytes(two, 0, tag, length) == bytes([round_ + 3 * (tag % 7)]) * length
        # What is sent may be written to at once, also where there was no room.
        message = bytearray(b"a" * LONGEST)
        for _ in range(100):
            two.post(0, 0, message)
        assert two.has_unsent
        message[:] = b"b" * LONGEST
        assert {receive_bytes(one, 1, 0, LONGEST) for _ in range(100)} == {b"a" * LONGEST}


@pytest.mark.parametrize(("sent", "expected"), [(12, 16), (16, 12), (0, 1), (LONGEST, 0)])
@pytest.mark.parametrize("is_there", [False, True])
def test_another_length_is_an_error_with_both(sent, expected, is_there):
    with mails(3) as (one, two, three):
        two.post(0, 1, bytes(sent))
        two.post(0, 0, b"")
        three.post(0, 0, b"a")
        if is_there:
            receive_bytes(one, 1, 0, 0)
        words = (
            f"rank 1 of the group sent {sent} bytes where {expected} were expected: the ranks run different operations"
        )
        with pytest.raises(RuntimeError, match=words):
            receive_bytes(one, 1, 1, expected)
        # What else is there may be meant for another wait than the next one; and nobody need wait for this rank.
        with pytest.raises(RuntimeError, match="closed after an earlier failure"):
            receive_bytes(one, 2, 0, 1)
        with pytest.raises(RuntimeError, match="rank 0 of the group has closed its connection"):
            receive_bytes(three, 0, 0, 1)


def test_full_sockets_hold_up_nobody():
    with mails(2) as (one, two):
        started = time.monotonic()
        count = filled(one, 1, 0)
        assert time.monotonic() - started < SOON
        back = filled(two, 0, 0)  # and the other way: neither waits for the other
        one.post(1, 1, b"after all of them")
        # The sender does nothing any more, and it arrives.
        found = [int.from_bytes(receive_bytes(two, 0, 0, LONGEST)[:4], "little") for _ in range(count)]
        assert found == list(range(count))
        assert receive_bytes(two, 0, 1, 17) == b"after all of them"
        for queue in (one, two):
            deadline = time.monotonic() + SOON
            while queue.has_unsent and queue is one and time.monotonic() < deadline:
                time.sleep(0.001)
        assert not one.has_unsent and two.has_unsent
        one.post(1, 1, b"by the short way again")
        assert receive_bytes(two, 0, 1, 22) == b"by the short way again"
        assert [int.from_bytes(receive_bytes(one, 1, 0, LONGEST)[-4:], "little") for _ in range(back)] == list(
            range(back)
        )


def test_a_cycle_of_ranks_that_wait_for_buffer_space_ends():
    with mails(3) as made:
        counts = [filled(queue, (rank + 1) % 3, 0) for rank, queue in enumerate(made)]

        def flush_then_receive(rank: int) -> list[int]:
            made[rank].flush()
            assert not made[rank].has_unsent
            before = (rank + 2) % 3
            return [
                int.from_bytes(receive_bytes(made[rank], before, 0, LONGEST)[:4], "little")
                for _ in range(counts[before])
            ]

        found = at_once(*(lambda rank=rank: flush_then_receive(rank) for rank in range(3)))
        assert found == [list(range(counts[(rank + 2) % 3])) for rank in range(3)]


def test_a_flush_ends_at_the_time_limit_and_with_a_rank_that_leaves():
    with mails(3, seconds=0.3) as (one, two, three):
        filled(one, 1, 0)
        filled(one, 2, 0)
        with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] of the group read nothing within its time limit"):
            one.flush()
        one.flush()  # the connections are closed
        one.post(1, 0, b"to a rank that has gone")
    with mails(3) as (one, two, three):
        filled(one, 1, 0)
        filled(one, 2, 0)
        threading.Timer(0.05, two.leave).start()
        threading.Timer(0.1, three.close).start()
        one.flush()
        one.post(1, 0, b"to a rank that has gone")


def test_a_wait_ends_at_the_time_limit_and_with_a_rank_that_leaves():
    with mails(3) as (one, two, three):
        two.post(0, 0, b"its last word")
        one.post(1, 0, b"never read")
        two.leave()
        assert receive_bytes(one, 1, 0, 13) == b"its last word"
        with pytest.raises(RuntimeError, match="rank 1 of the group has closed its connection"):
            receive_bytes(one, 1, 0, 1)
    with mails(3, seconds=0.3) as (one, _, three):
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 2 of the group sent nothing within the group's time limit"):
            receive_bytes(one, 2, 0, 1)
        assert 0.2 < time.monotonic() - started < SOON
    with mails(3) as (one, _, three):
        (error,) = at_once(lambda: (threading.Timer(0.05, one.close).start(), receive_bytes(one, 2, 0, 1)))
        assert "rank 2 of the group has closed its connection" in str(error)
        one.leave()
        assert one.is_over and not three.is_over


def test_receivers_of_a_tag_get_its_messages_in_the_order_of_their_calls():
    with mails(3) as (one, two, three):
        buffers = [{peer: memoryview(bytearray(1)) for peer in (1, 2)} for _ in range(4)]
        places = [dict(buffer) for buffer in buffers]
        waits = [one.request(0, buffer) for buffer in buffers]
        for number in range(4):
            for queue in (two, three):
                queue.post(0, 0, bytes([number]))
        waits[2]()
        waits[0]()
        del waits[1]  # it is never asked for: the last one still gets what is its own
        waits[2]()
        waits[2]()
        assert [[bytes(place[peer]) for peer in (1, 2)] for place in places] == [[bytes([n])] * 2 for n in range(4)]


def test_a_queue_needs_buffer_space_for_the_longest_message(monkeypatch):
    monkeypatch.setattr(queue_module, "_SOCKET_BYTES", 4096)
    with pytest.raises(OSError, match="no free space for messages"), mails(2):
        pass


def small(transport: Transport, value: float, label: str = "a call", channel: str = "call") -> list[float]:
    return transport.gather_small(torch.tensor([value]), channel=channel, label=label).flatten().tolist()


def _is_shared() -> None:
    """Engines of one group, at once; other groups; what travels; what is left."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, second = Job.adopt().axis_of().transport(), Job.adopt().axis_of().transport()
    second.owner = 1
    warm_up(first)
    before = len(os.listdir("/proc/self/fd"))
    warm_up(second)
    assert open_message_queue(first) is open_message_queue(second) is first.watched.queue
    assert len(os.listdir("/proc/self/fd")) == before
    # Each rank waits for what it has begun in an order of its own.
    for step in range(50):
        started = {}
        for number, transport in enumerate((first, second)):
            for channel in ("order", "step", "call"):
                for again in range(2):
                    value = torch.tensor([1000 * number + 10 * step + again, rank, len(channel)])
                    started[number, channel, again] = (
                        value,
                        transport.start_small(value, channel=channel, label="a call"),
                    )
        names = sorted(started, key=lambda name: hash((name[0], name[2], rank, step, len(name[1]))))
        for name in names:
            value, wait = started[name]
            expected = value.repeat(size, 1)
            expected[:, 1] = torch.arange(size)
            assert torch.equal(wait(), expected) and torch.equal(wait(), expected), name
    # The same values, bytes and transfers as over gloo; tensors of any dtype, also long and empty ones.
    for mode in (torch.inference_mode(), torch.enable_grad()):
        with mode:
            for value in (
                torch.arange(5, dtype=torch.int16) + rank,
                torch.tensor([True, rank == 1]),
                torch.full((3,), float(rank), dtype=torch.bfloat16),
                torch.zeros(0),
                torch.full((LONGEST,), rank, dtype=torch.uint8),
                torch.full((LONGEST + 1,), rank, dtype=torch.uint8),
                torch.full((2,), float(rank), requires_grad=True),
            ):
                result = []
                queue = first.watched.queue
                for first.watched.queue in (queue, None):
                    with counted() as traffic:
                        rows = first.gather_small(value, channel="step", label="a step")
                    result.append((rows.detach(), traffic.ran["send"].nbytes, traffic.ran["send"].calls))
                first.watched.queue = queue
                assert torch.equal(result[0][0], result[1][0]) and result[0][1:] == result[1][1:], (value.dtype, result)
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_engines_of_a_group_share_it_and_do_not_mix(size):
    run_ranks(_is_shared, size)


@on_ranks(2, fresh=True)
def test_ranks_of_several_hosts_continue_over_gloo() -> None:
    """Ranks of different hosts, of hosts that have no room, or which cannot be reached, use gloo; nothing is left."""
    before = sockets._host
    results = []
    group = dist.new_group([0, 1])
    open_before = len(os.listdir("/proc/self/fd"))
    for spoil in ("nothing", "the host", "the room of one"):
        transport = Job.adopt().connector.over(dist.new_group([0, 1]) if spoil == "nothing" else group, None)
        transport.watched.has_met = False
        buffer = queue_module._SOCKET_BYTES
        if spoil == "the host":
            sockets._host = lambda: f"host {dist.get_rank()}"
        if spoil == "the room of one" and dist.get_rank() == 1:
            queue_module._SOCKET_BYTES = 4096
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", ResourceWarning)
                warm_up(transport)
        finally:
            sockets._host, queue_module._SOCKET_BYTES = before, buffer
        assert (transport.watched.queue is not None) == (spoil == "nothing")
        results.append([small(transport, 3.5 * dist.get_rank() + step) for step in range(5)])
    assert results[0] == results[1] == results[2]
    gc.collect()
    dist.barrier()
    # One group more, with one connection.
    assert len(os.listdir("/proc/self/fd")) < open_before + 12


def _sockets_without_names() -> int:
    """Sockets of this process that are not gloo's."""
    with open("/proc/net/unix", encoding="ascii") as file:
        unix = {line.split()[6] for line in file.readlines()[1:]}
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the one that lists them
            continue
    return sum(link.startswith("socket:[") and link[8:-1] in unix for link in links)


@on_ranks(2, fresh=True)
def test_destroying_a_group_drops_its_messages() -> None:
    """Destroying a process group closes its connections, and the job's other groups still work."""
    world = Job.adopt().axis_of().transport()
    warm_up(world)
    kept, counts, aborts = [], [], []
    for _ in range(6):
        group = dist.new_group([0, 1])
        transport = Job.adopt().connector.over(group, None)
        warm_up(transport)
        queue = transport.watched.queue
        assert queue is not None and small(transport, 1.0) == [1.0, 1.0]
        kept.append(transport)
        dist.barrier(group)
        dist.destroy_process_group(group)
        after = Job.adopt().connector.over(
            dist.new_group([0, 1]), None
        )  # whoever asks for a group hears of those that are gone
        assert queue.is_over and after.watched is not None
        for call in (transport.gather_small, transport.start_small):
            with pytest.raises(
                CommunicationError, match="a call: the process group of this belongs to a job that is over"
            ):
                call(torch.ones(1), channel="call", label="a call")
        assert small(world, float(world.rank)) == [0.0, 1.0]
        dist.barrier()
        dist.destroy_process_group(after.group)
        after.watched = None
        counts.append(_sockets_without_names())
        aborts.append(len(world.watch.aborts) + len(world.watch._connections))
    assert counts[5] == counts[1] and aborts[5] == aborts[1], (counts, aborts)


_LEFT: list[Any] = []  # of former jobs


def _job() -> tuple[int, int]:
    transport = Job.adopt().axis_of().transport()
    warm_up(transport)
    assert small(transport, 1.0) == [1.0, 1.0]
    if dist.get_rank() == 0:
        filled(transport.watched.queue, 1, 99)
    _LEFT.append(
        (transport, transport.watched.queue, transport.start_small(torch.ones(1), channel="call", label="a call"))
    )
    found = _sockets_without_names(), len(os.listdir("/proc/self/task"))
    dist.barrier()
    return found


def _after_the_jobs() -> None:
    assert len(_LEFT) == 3
    for transport, queue, wait in _LEFT:
        assert queue.is_over
        for call in (wait, lambda transport=transport: small(transport, 1.0)):
            with pytest.raises(CommunicationError, match="job that is over.*new engine"):
                call()
    _LEFT.clear()
    assert not any(thread.name == "deepspeed-send" for thread in threading.enumerate())


def test_a_job_that_is_over_holds_no_connections():
    found = [run_ranks(_job, 2) for _ in range(3)]
    assert found[0] == found[1] == found[2], found
    run_ranks(_after_the_jobs, 2)


@on_ranks(2, fresh=True)
def test_ranks_that_take_different_branches_are_named() -> None:
    transport = Job.adopt().axis_of().transport()
    warm_up(transport)
    started = time.monotonic()
    label = "the first call" if transport.rank == 0 else "the second call"
    with pytest.raises(DivergenceError, match="rank 0 waits for the first call; rank 1 waits for the second call"):
        small(transport, 1.0, label, "call" if transport.rank == 0 else "step")
    assert time.monotonic() - started < SOON
    with pytest.raises((DivergenceError, CommunicationError)):
        small(transport, 1.0)


@on_ranks(2, fresh=True)
def test_rows_of_other_lengths_are_an_error() -> None:
    transport = Job.adopt().axis_of().transport()
    warm_up(transport)
    transport.watch._patience = 0.0  # no rank has words that would say more
    words = f"sent {(3, 2)[transport.rank] * 4} bytes where {(2, 3)[transport.rank] * 4} were expected"
    with pytest.raises(CommunicationError, match=words):
        transport.gather_small(torch.ones(2 + transport.rank), channel="call", label="a call")


def _killed(folder: str) -> None:
    transport = Job.adopt().axis_of().transport()
    warm_up(transport)
    small(transport, 1.0)
    child = 0
    if transport.rank > 0:
        child = os.fork()  # a data loader's process, say, that lives on
        if child == 0:
            time.sleep(600)
            os._exit(0)
    if transport.rank == 2:
        started = transport.start_small(torch.ones(1), channel="call", label="the losses")
        os.kill(os.getpid(), signal.SIGKILL)
        started()
    assert small(transport, 2.0, "the losses") == [2.0, 2.0, 1.0]  # what it had sent comes
    started = time.monotonic()
    with pytest.raises(CommunicationError, match="the process of rank 2 has died"):
        small(transport, 1.0, "the end")
    assert time.monotonic() - started < SOON
    if child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with open(f"{folder}/{transport.rank}", "w"):
        pass


def test_a_rank_that_is_killed_ends_the_waits(tmp_path):
    with pytest.raises(RanksFailed):
        run_ranks(_killed, 3, str(tmp_path), fresh=True)
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


@on_ranks(2, fresh=True)
def test_a_wait_ends_at_the_time_limit_of_the_group() -> None:
    transport = Job.adopt().connector.over(dist.new_group([0, 1], timeout=timedelta(seconds=1.5)), None)
    warm_up(transport)
    transport.watch._patience = 0.0
    started = time.monotonic()
    if transport.rank == 0:
        with pytest.raises(CommunicationError, match="rank 1 of the group sent nothing within the group's time limit"):
            small(transport, 1.0)
        assert 1.4 < time.monotonic() - started < SOON
    dist.barrier()


@on_ranks(3, fresh=True)
def test_a_rank_that_reads_late_is_no_divergence() -> None:
    """Stage 1 waits for room at stage 0, which is late; stage 2 waits for both, in a call that they come to later."""
    queue_module._SOCKET_BYTES = 1 << 17
    transports = StageChannels(Job.adopt(), Mesh((("pipe", 3),)), torch.device("cpu"))
    transport = Job.adopt().axis_of().transport()
    assert transports._queue is open_message_queue(transport)
    message = torch.ones(16000)
    if transports.stage == 0:
        incoming = transports.incoming("gradients", 1)
        incoming.expect(20)
        for number in range(20):
            if number == 5:
                time.sleep(1.5)
            assert torch.equal(incoming.take(number), number * message)
    if transports.stage == 1:
        for number in range(20):
            transports.outgoing("gradients", 0).send(number, number * message)
        assert transports._queue.has_unsent
        transports.drain()
        assert not transports._queue.has_unsent
    assert small(transport, 1.0) == [1.0] * 3


@on_ranks(3)
def test_a_failed_rendezvous_leaves_nothing() -> None:
    """No rank can be reached: nothing of the attempt stays open."""
    transport = Job.adopt().axis_of().transport()
    open_before = _sockets_without_names()

    def make(_transport: Transport, connections: dict[int, socket.socket]) -> MessageQueue:
        if dist.get_rank() == 1:
            raise OSError("no room")
        return MessageQueue(connections, 1.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        assert connect_on_host(transport, make, "a meeting") is None
        gc.collect()
    assert _sockets_without_names() == open_before
