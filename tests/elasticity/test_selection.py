"""Which processes get ranks."""

import pytest

from deepspeed.comm.members.member import RunMember
from deepspeed.comm.members.regroup import ReadyMember
from deepspeed.elasticity.selection import RunShape
from deepspeed.errors import CommunicationError


def member(number: int, parts: int, rank: int | None = None) -> RunMember:
    return RunMember(number, number if rank is None else rank, "here", number, 0, ("here", 0), number % parts)


def holding(ranks: int, parts: int, living: list[int], generation: int = 5) -> dict[int, ReadyMember]:
    """Each has its own copy, and that of the one before it in the ring: the same part of the model goes first."""
    ring = sorted(range(ranks), key=lambda rank: (rank % parts, rank))
    before = {rank: ring[ring.index(rank) - 1] for rank in ring}
    return {
        number: ReadyMember(0, [[[generation, 0], owner, ranks] for owner in (number, before[number])], [])
        for number in living
    }


@pytest.mark.parametrize(
    ("ranks", "parts", "dead", "expected", "spares"),
    [
        (4, 1, [2], [0, 1, 3], []),
        (4, 2, [0], [2, 3], [1]),  # not rank 1, which has no copy of what rank 3 holds
        (4, 2, [3], [0, 1], [2]),
        (4, 2, [2, 3], [0, 1], []),
        (6, 2, [0, 3], [2, 1, 4, 5], []),  # what is left of two copies of the model makes one
        (6, 2, [4], [0, 1, 2, 3], [5]),
        (6, 3, [1], [3, 4, 5], [0, 2]),
    ],
)
def test_as_many_as_can_get_ranks_and_have_all_copies(ranks, parts, dead, expected, spares):
    left = [number for number in range(ranks) if number not in dead]
    living = [member(number, parts) for number in left]
    chosen = RunShape(parts).choose(living, holding(ranks, parts, left), [])
    assert [one.number for one in chosen.members] == expected
    assert [one.number for one in chosen.spares] == spares
    assert [(one.rank, one.part) for one in chosen.members] == [(r, r % parts) for r in range(len(expected))]
    assert all(one.rank == -1 for one in chosen.spares)
    assert chosen.source == (5, 0)


def test_who_has_the_newest_copies_gets_a_rank():
    """Member 2 would do, but only member 0 has finished the last update."""
    living = [member(number, 2) for number in (0, 1, 2)]
    of = {0: [[[6, 0], 0, 2]], 1: [[[6, 0], 1, 2], [[5, 0], 1, 2]], 2: [[[5, 0], 0, 2]]}
    ready = {number: ReadyMember(0, held, []) for number, held in of.items()}
    chosen = RunShape(2).choose([living[2], living[1], living[0]], ready, [])
    assert [one.number for one in chosen.members] == [0, 1]
    assert chosen.source == (6, 0)


@pytest.mark.parametrize(
    ("left", "joining", "expected"),
    [
        ([0, 1, 2, 3], 1, 4),  # it waits for a second one
        ([0, 1, 2, 3], 2, 6),
        ([0, 1, 2], 1, 4),
        ([0, 1, 2], 3, 6),
        ([0, 1, 2], 2, 4),
    ],
)
def test_as_many_join_as_make_a_larger_job(left, joining, expected):
    living = [member(number, 2) for number in left]
    new = [RunMember(100 + number, -1, "there", 0, 0, ("there", number)) for number in range(joining)]
    ready = {number: ReadyMember(0, [[[1, 0], number % 2, 2]], []) for number in left}
    chosen = RunShape(2).choose(living, ready, new)
    assert [one.part for one in chosen.members] == [rank % 2 for rank in range(expected)]
    assert all(one.part == one.number % 2 for one in chosen.members if one.number < 100)
    assert {one.number for one in living} <= {one.number for one in (*chosen.members, *chosen.spares)}
    without = RunShape(2).choose(living, {n: ReadyMember(0, [], []) for n in left}, new)
    assert without.source is None  # the checkpoint is loaded, by those who have been there
    assert not {one.number for one in without.members} & {one.number for one in new}


def test_ranks_that_share_sequences_are_a_multiple():
    living = [member(number, 1) for number in (0, 2, 3)]
    ready = {one.number: ReadyMember(0, [[[1, 0], 0, 1]], []) for one in living}
    chosen = RunShape(multiple=2).choose(living, ready, [])
    assert [one.number for one in chosen.members] == [0, 2]
    assert [one.number for one in chosen.spares] == [3]


@pytest.mark.parametrize(
    ("ranks", "parts", "left", "expected", "spares"),
    [
        (4, 2, [1, 3], [(3, 0), (1, 1)], []),
        (6, 2, [1, 3, 5], [(3, 0), (1, 1)], [(5, 1)]),
        (8, 2, [1, 3, 5, 7], [(5, 0), (1, 1), (7, 0), (3, 1)], []),
        (9, 3, [1, 2, 4, 7], [(4, 0), (1, 1), (2, 2)], [(7, 1)]),
    ],
)
def test_others_take_a_part_that_nobody_holds_any_more(ranks, parts, left, expected, spares):
    """Nobody has states of it, and as few as can take another part."""
    living = [member(number, parts) for number in left]
    chosen = RunShape(parts).choose(living, holding(ranks, parts, left), [])
    assert [(one.number, one.part) for one in chosen.members] == expected
    assert [one.rank for one in chosen.members] == list(range(len(expected)))
    assert [(one.number, one.part) for one in chosen.spares] == spares
    assert chosen.source is None


def test_a_part_that_nobody_holds_any_more_ends_the_run_of_too_few():
    with pytest.raises(CommunicationError, match=r"each of the 2 part.*found 0 of part 0, and 1 process"):
        RunShape(2).choose([member(1, 2)], holding(2, 2, [1]), [])


def test_a_choice_of_many_is_made_at_once():
    """Of 300 processes with one part 200 get ranks."""
    living = [member(number, 2) for number in range(600) if number % 2 or number < 400]
    ready = {one.number: ReadyMember(0, [], []) for one in living}
    chosen = RunShape(2).choose(living, ready, [])
    assert len(chosen.members) == 400 and len(chosen.spares) == 100


def test_the_parts_that_too_few_processes_hold_are_named():
    """Two processes of part 0 are enough for ranks that share sequences in pairs; one of part 1 is not."""
    living = [member(number, 2) for number in (0, 1, 2)]
    with pytest.raises(CommunicationError, match=r"least 2 living process\(es\) .* found 1 of part 1, and 3 process"):
        RunShape(2, multiple=2).choose(living, holding(4, 2, [0, 1, 2]), [])
