"""Who orthogonalises which matrix, and what travels to get it there. Pure arithmetic, equal on all ranks.

Every rank knows how the tensors are cut (``SharedTensor``), so every rank can say who holds what, and nothing has to
be exchanged to agree. Ranks are meant by position here, in the order in which the buffers are cut.

A matrix that lies wholly on one rank stays there if that rank has room; one that is cut goes to the rank that holds
most of it. No rank gets more than its fair share of elements, within one matrix. Matrices are handled in rounds, so
that the buffers are bounded. The cost grows with the matrices and the logarithm of the ranks, beside one number per
rank and round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed.ops.segments import SharedTensor


@dataclass(frozen=True)
class MatrixSegment:
    """Elements ``[start, stop)`` of the flattened ``tensor``, which travel from or to the rank at position ``peer``."""

    tensor: SharedTensor
    start: int
    stop: int
    peer: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class MuonRound:
    """Matrices handled together.

    Attributes:
        owners: Each matrix with the position of the rank that orthogonalises it, in the order of their numbers.
    """

    owners: tuple[tuple[SharedTensor, int], ...]

    def owned_by(self, position: int) -> list[SharedTensor]:
        """Returns the matrices that a rank orthogonalises."""
        return [tensor for tensor, owner in self.owners if owner == position]

    def sent_by(self, position: int) -> list[MatrixSegment]:
        """Returns what a rank holds of each matrix; ``peer`` is the owner."""
        return [
            MatrixSegment(tensor, *tensor.held_by(position), owner)
            for tensor, owner in self.owners
            if tensor.numel_at(position)
        ]

    def received_by(self, position: int) -> list[MatrixSegment]:
        """Returns the parts of the matrices that a rank orthogonalises; ``peer`` is the rank that has the part."""
        return [
            MatrixSegment(tensor, *tensor.held_by(peer), peer)
            for tensor in self.owned_by(position)
            for peer in tensor.positions()
            if tensor.numel_at(peer)
        ]


def plan_rounds(tensors: Iterable[SharedTensor], world_size: int, round_numel: int) -> list[MuonRound]:
    """Plans the exchange.

    Args:
        tensors: The matrices, with the same numbers on all ranks.
        world_size: Ranks that share them.
        round_numel: Elements, over all ranks, that one round should not exceed (a single matrix may).

    Raises:
        ValueError: A tensor has fewer than 2 dimensions.
    """
    members = list(tensors)
    for tensor in members:
        if len(tensor.shape) < 2:
            raise ValueError(
                f"Muon orthogonalises matrices, but {tensor.name} has shape {tensor.shape}; put it in a group with "
                "use_muon=False"
            )
    return [_with_owners(together, world_size) for together in _rounds_of(members, round_numel)]


def heaviest_position(rounds: Iterable[MuonRound]) -> int | None:
    """Returns the owner of the largest matrix; among several, the one with most other elements in that round.

    Returns:
        Its position; None without matrices.
    """
    heaviest = (0, 0, 0)
    for planned in rounds:
        largest: dict[int, int] = defaultdict(int)
        total: dict[int, int] = defaultdict(int)
        for tensor, owner in planned.owners:
            largest[owner] = max(largest[owner], tensor.numel)
            total[owner] += tensor.numel
        heaviest = max(heaviest, *((largest[owner], total[owner], -owner) for owner in total))
    return -heaviest[2] if heaviest[0] else None


def _rounds_of(tensors: list[SharedTensor], round_numel: int) -> list[list[SharedTensor]]:
    """Largest matrices first, so that those of one round are alike and balance well."""
    rounds: list[list[SharedTensor]] = []
    filled = 0
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.numel, tensor.index)):
        if not rounds or filled + tensor.numel > round_numel:
            rounds.append([])
            filled = 0
        rounds[-1].append(tensor)
        filled += tensor.numel
    return rounds


def _with_owners(members: list[SharedTensor], world_size: int) -> MuonRound:
    """Returns the rank with the largest part, unless that would give it more than its share; then the least loaded."""
    loads = _SegmentTree(world_size)
    fair = sum(tensor.numel for tensor in members) / world_size
    owners = []
    for tensor in members:
        having = tensor.positions()
        # The first rank with a part, the last, the best of those between, whose parts are equal; the best of all.
        candidates = []
        for positions in (having[:1], having[1:-1], having[-1:], range(world_size)):
            if positions:
                load, position = loads.least(positions)
                candidates.append((load, -tensor.numel_at(position), position))
        load, _, owner = min(candidates, key=lambda candidate: (candidate[1], candidate[0], candidate[2]))
        if load and load + tensor.numel > fair:
            _, _, owner = min(candidates)
        loads.add(owner, tensor.numel)
        owners.append((tensor, owner))
    return MuonRound(tuple(sorted(owners, key=lambda entry: entry[0].index)))


class _SegmentTree:
    """Elements by position, all 0 at first; finds the least of a range in logarithmic time.

    A binary tree in a list: the leaves are the positions, a node is the least of the two below. Load and position are
    one number, so that of equal loads the first position is the least.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._tree = [0] * size + list(range(size))
        for node in range(size - 1, 0, -1):
            self._tree[node] = min(self._tree[2 * node], self._tree[2 * node + 1])

    def add(self, position: int, numel: int) -> None:
        """Adds to the load of one position."""
        node = self._size + position
        self._tree[node] += numel * self._size
        while node > 1:
            node //= 2
            self._tree[node] = min(self._tree[2 * node], self._tree[2 * node + 1])

    def least(self, positions: range) -> tuple[int, int]:
        """Load and position of the least loaded of consecutive positions, of equals the first."""
        first, last = self._size + positions[0], self._size + positions[-1] + 1
        least = self._tree[first]
        while first < last:
            if first % 2:
                least = min(least, self._tree[first])
                first += 1
            if last % 2:
                last -= 1
                least = min(least, self._tree[last])
            first, last = first // 2, last // 2
        return divmod(least, self._size)
