"""Copies in host memory: which generations are kept, and which count."""

import os
import pickle
import signal
from typing import Any

import pytest
import torch

from deepspeed.comm.base.encoding import decode, encode
from deepspeed.comm.members.member import RunMember
from deepspeed.comm.members.regroup import ReadyMember
from deepspeed.elasticity.copies import (
    BuddyLink,
    CopyLayout,
    CopyStore,
    ForwardStates,
    RankCopyBuffer,
    SmallStates,
    newest_whole,
)
from deepspeed.elasticity.copy_memory import CopyMemory, MemoryAddress
from tests.harness.loopback import LoopbackTransport, run_threads


def layout_of(epoch: int, owners: tuple[int, ...] = (0, 1, 2), parts: tuple[int, ...] = ()) -> CopyLayout:
    return CopyLayout(epoch, owners, (), frozenset(), frozenset(), {}, False, parts or owners)


def write(copies: RankCopyBuffer, generation: int, value: int, extra: bytes = b"", capacity: int = 1000) -> None:
    """A copy of eight bytes."""
    tail = encode(({}, b"small" + extra))
    place = copies.allocate(8 + len(tail), capacity).begin(8, len(tail))
    place[:8] = value
    place[8:] = torch.frombuffer(bytearray(tail), dtype=torch.uint8)
    next(memory for memory in copies.memories if memory.content.data_ptr() == place.data_ptr()).end(generation)


def holding(number: int, *copies: tuple[Any, ...]) -> CopyStore:
    """Holds copies by generation, epoch, owner, perhaps the owners and the parts of the job."""
    store = CopyStore(number)
    for generation, epoch, owner, *more in copies:
        write(store.of_owner(layout_of(epoch, *more), owner), generation, 0)
    return store


def test_memory_of_the_generation_before_the_last_is_used_again():
    store = holding(0, (4, 0, 0), (5, 0, 0))
    copies = store.of_owner(layout_of(0), 0)
    oldest = next(memory for memory in copies.memories if memory.generation == 4)
    assert copies.allocate(8, 8) is oldest
    assert not store.of_key((4, 0)) and store.of_key((5, 0))
    assert copies.allocate(5000, 6000) is not oldest and store.of_key((5, 0))


def test_copies_of_the_job_before_stay_while_those_of_the_next_one_are_made():
    """Generation 5 is not whole, so a recovery begins with 4; if it is broken off, the next one does too."""
    store = holding(0, (4, 0, 0), (5, 0, 0), (4, 1, 0))
    assert store.of_key((4, 0)) and store.of_key((5, 0))
    store.trim(1)
    assert [key for key, *_ in store.listed()] == [[4, 1]]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([[(5, 0, 0), (5, 0, 2)], [(5, 0, 1), (5, 0, 0)]], (5, 0)),
        ([[(5, 0, 0), (4, 0, 0), (4, 0, 2)], [(4, 0, 1)]], (4, 0)),  # rank 2 died before it had sent generation 5
        ([[(5, 0, 0)], [(5, 0, 1)]], None),
        ([[(5, 0, 0, (0, 1, 2, 3), (0, 1, 0, 1))], [(5, 0, 3, (0, 1, 2, 3), (0, 1, 0, 1))]], (5, 0)),  # replicas
        ([[(5, 0, 0, (0, 1, 2, 3), (0, 1, 0, 1))], [(5, 0, 2, (0, 1, 2, 3), (0, 1, 0, 1))]], None),
    ],
)
def test_the_newest_generation_that_is_whole_counts(held, expected):
    members = [RunMember(number, number, "host", 0, 0, ("host", 0)) for number in range(len(held))]
    ready = {number: ReadyMember(0, holding(number, *copies).listed(), []) for number, copies in enumerate(held)}
    assert newest_whole(members, ready) == expected


def test_memory_outlives_the_process_that_made_it():
    """It is seen only where the header has the token of the address, and a copy only when it is complete."""
    ours, theirs = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            memory = CopyMemory.allocate(100)
            assert memory.address is not None
            os.write(ours[1], pickle.dumps(tuple(memory.address)))
            for generation in (3, 4):
                os.read(theirs[0], 1)
                place = memory.begin(5, 1)
                place.fill_(generation)
                if generation == 3:
                    memory.end(generation)
                os.write(ours[1], b"x")
            os.read(theirs[0], 1)
        finally:
            os._exit(0)
    address = MemoryAddress(*pickle.loads(os.read(ours[0], 1000)))
    assert CopyMemory.open(address._replace(host="elsewhere")) is None
    assert CopyMemory.open(address._replace(token=bytes(16))) is None
    found = CopyMemory.open(address)
    assert found is not None and found.generation is None
    for generation in (3, None):
        os.write(theirs[1], b"x")
        os.read(ours[0], 1)
        assert found.generation == generation
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (found.data.tolist(), found.tail) == ([4] * 5, bytes([4]))
    assert CopyMemory.open(address) is None  # nobody is there any more
    for end in (*ours, *theirs):
        os.close(end)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("hidden", [(), (0,), (0, 1, 2)])
def test_copies_reach_the_next_rank(size, hidden):
    """Never sent if the memory can be opened, and seen without a call; a rank with larger copies has others open it."""
    asked: set[int] = set()

    def body(transport: LoopbackTransport) -> None:
        rank, owners = transport.rank, tuple(range(10, 10 + size))
        store, before = CopyStore(owners[rank]), (rank - 1) % size
        link = BuddyLink(transport, store, layout_of(0, owners))
        own = store.of_owner(layout_of(0, owners), owners[rank])
        for generation in range(6):
            larger = b" " * 2000 if (rank, generation) == (1, 3) else b""
            write(own, generation, 10 * generation + rank, larger, capacity=5000 if larger else 1000)
            if rank in hidden:
                for memory in own.memories:
                    memory.address = None
            link.exchange()
            # As the next update, which needs a message of all ranks: before it nobody makes a further copy.
            if transport.gather_small(torch.tensor([link.must_open]), channel="step", label="the update").any():
                asked.add(generation)
                link.open()
            for number in range(max(generation - 1, 0), generation + 1):  # the one before stays as it was
                found = {copy.owner: (copy.data.tolist(), copy.small) for copy in store.of_key((number, 0))}
                values, small = found[owners[before]]
                assert values == [10 * number + before] * 8
                assert len(small) == (2005 if (before, number) == (1, 3) else 5)
            transport.gather_small(torch.zeros(1), channel="test", label="the end of these looks")
        assert len(store.listed()) == 4
        assert (link.sent > 0) == (rank in hidden)

    run_threads(body, size)
    assert asked == (set() if 1 in hidden else {3})


@pytest.mark.parametrize(
    "value", [torch.tensor(3.0), torch.arange(6).view(2, 3).T, torch.ones(3, dtype=torch.bfloat16)]
)
def test_small_states_are_what_they_were(value):
    """Tensors of no dimension, of other strides, and of 16 bits."""
    forward = ForwardStates({"buffer": value, "empty": torch.empty(0)}, {}, {})
    states = SmallStates(
        {"global_steps": 3}, "AdamW", [], [(("weight",), {"step": value.clone()})], None, 0, None, forward
    )
    found = decode(encode(states))
    for again in (found.forward.buffers["buffer"], found.scalars[0][1]["step"]):
        assert again.dtype == value.dtype and torch.equal(again, value)
        again += 1  # it can be written
    assert found.forward.buffers["empty"].shape == (0,) and found.counters == {"global_steps": 3}
