"""Copies in host memory: which generations are kept, and which count."""

from __future__ import annotations

import json
import os
import pickle
import signal

import pytest
import torch

from deepspeed.comm.members.member import RunMember
from deepspeed.comm.members.regroup import ReadyMember
from deepspeed.elasticity.copies import (
    BuddyLink,
    CopyLayout,
    CopyStore,
    ForwardStates,
    SmallStates,
    StateCopy,
    _pickled,
    newest_whole,
)
from deepspeed.elasticity.copy_memory import CopyMemory, MemoryAddress, open_memory
from tests.harness.loopback import LoopbackTransport, run_threads


def made(
    generation: int, epoch: int, owner: int, owners: tuple[int, ...] = (0, 1, 2), parts: tuple[int, ...] = ()
) -> StateCopy:
    layout = CopyLayout(epoch, owners, (), frozenset(), frozenset(), {}, False, parts or owners)
    memory = CopyMemory(8)
    return StateCopy(generation, owner, layout, {}, b"", memory.data, memory)


def holding(number: int, *copies: StateCopy) -> CopyStore:
    store = CopyStore(number)
    for copy in copies:
        store.put(copy)
    return store


def test_memory_of_the_generation_before_the_last_is_used_again():
    store = holding(0, *(made(generation, 0, 0) for generation in (4, 5)))
    oldest = store.of_key((4, 0))[0].memory
    assert oldest is not None and store.spare(0, 8, 0) is oldest
    assert not store.of_key((4, 0)) and store.of_key((5, 0))


def test_copies_of_the_job_before_stay_while_those_of_the_next_one_are_made():
    """Generation 5 is not whole, so a recovery begins with 4; if it is broken off, the next one does too."""
    store = holding(0, *(made(generation, 0, 0) for generation in (4, 5)))
    store.put(made(4, 1, 0))
    store.spare(0, 8, 1)
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
    ready = {
        number: ReadyMember(0, holding(number, *(made(*copy) for copy in copies)).listed(), [])
        for number, copies in enumerate(held)
    }
    assert newest_whole(members, ready) == expected


def test_memory_outlives_the_process_that_made_it():
    ours, theirs = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            memory = CopyMemory(5)
            memory.data.fill_(3)
            os.write(ours[1], json.dumps(memory.address).encode())
            os.read(theirs[0], 1)
            memory.data.fill_(4)
            os.write(ours[1], b"x")
            os.read(theirs[0], 1)
        finally:
            os._exit(0)
    address = MemoryAddress(*json.loads(os.read(ours[0], 1000)))
    wrong, right = torch.zeros(5, dtype=torch.uint8), torch.full((5,), 3, dtype=torch.uint8)
    assert open_memory(address, wrong) is None
    assert open_memory(address._replace(host="elsewhere"), right) is None
    found = open_memory(address, right)
    assert found is not None
    os.write(theirs[1], b"x")
    os.read(ours[0], 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert found.tolist() == [4] * 5
    assert open_memory(address, found) is None  # nobody is there any more
    for end in (*ours, *theirs):
        os.close(end)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_shared", [True, False])
def test_copies_reach_the_next_rank(size, is_shared):
    """Sent once for each of the two memories, if that can be opened; always the values of the newest generation."""

    def body(transport: LoopbackTransport) -> None:
        owners = tuple(range(10, 10 + size))
        store = CopyStore(owners[transport.rank])
        link = BuddyLink(transport, store)
        layout = CopyLayout(0, owners, (), frozenset(), frozenset(), {}, False, owners)
        for generation in range(6):
            memory = store.spare(owners[transport.rank], 8, 0)
            if not is_shared:
                memory.address = None
            memory.data.fill_(10 * generation + transport.rank)
            own = StateCopy(generation, owners[transport.rank], layout, {}, b"small", memory.data, memory)
            theirs = link.exchange(own)
            assert theirs is not None
            store.put(own)
            store.put(theirs)
            before = (transport.rank - 1) % size
            for number in range(max(generation - 1, 0), generation + 1):  # the one before stays as it was
                found = {copy.owner: copy.data.tolist() for copy in store.of_key((number, 0))}
                assert found[owners[before]] == [10 * number + before] * 8
            assert len(store.listed()) == 2 * min(generation + 1, 2)
            # As the next update, which needs a word of all ranks: before it nobody makes a further copy.
            transport.gather_small(torch.zeros(1), channel="step", label="the update")
        assert link.sent == 8 * (2 if is_shared else 6)

    run_threads(body, size)


@pytest.mark.parametrize(
    "value", [torch.tensor(3.0), torch.arange(6).view(2, 3).T, torch.ones(3, dtype=torch.bfloat16)]
)
def test_small_states_are_what_they_were(value):
    """Tensors of no dimension, of other strides, and of 16 bits."""
    forward = ForwardStates({"buffer": value, "empty": torch.empty(0)}, {}, {})
    states = SmallStates(
        {"global_steps": 3}, "AdamW", [], [(("weight",), {"step": value.clone()})], None, 0, None, forward
    )
    found = pickle.loads(_pickled(states))
    for again in (found.forward.buffers["buffer"], found.scalars[0][1]["step"]):
        assert again.dtype == value.dtype and torch.equal(again, value)
        again += 1  # it can be written
    assert found.forward.buffers["empty"].shape == (0,) and found.counters == {"global_steps": 3}
