"""Copies in host memory: which generations are kept, and which count."""

from __future__ import annotations

import pytest
import torch

from deepspeed.comm.members.member import RunMember
from deepspeed.comm.members.regroup import ReadyMember
from deepspeed.elasticity.copies import CopyLayout, CopyStore, StateCopy, newest_whole


def made(
    generation: int, epoch: int, owner: int, owners: tuple[int, ...] = (0, 1, 2), parts: tuple[int, ...] = ()
) -> StateCopy:
    layout = CopyLayout(epoch, owners, (), frozenset(), frozenset(), {}, False, parts or owners)
    return StateCopy(generation, owner, layout, {}, b"", torch.zeros(8, dtype=torch.uint8))


def holding(number: int, *copies: StateCopy) -> CopyStore:
    store = CopyStore(number)
    for copy in copies:
        store.put(copy)
    return store


def test_memory_of_the_generation_before_the_last_is_used_again():
    store = holding(0, *(made(generation, 0, 0) for generation in (4, 5)))
    oldest = store.of_key((4, 0))[0].data
    assert store.spare(0, 8, 0) is oldest
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
