"""Who orthogonalises which matrix, and what travels to get it there. Pure arithmetic, equal on all ranks.

A matrix that lies wholly on one rank stays there if that rank has room; one that is cut goes to the rank that holds
most of it. No rank gets more than its fair share of elements, within one matrix. Matrices are handled in rounds, so
that the buffers are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of the flattened matrix number ``index``, held by one rank."""

    index: int
    start: int
    stop: int
    shape: tuple[int, ...]
    name: str

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Round:
    """Matrices handled together.

    Attributes:
        owned: Per rank, the numbers of the matrices it orthogonalises, ascending.
        pieces: Per holding rank and owning rank, what the first has of the second's matrices, in the order sent.
    """

    owned: tuple[tuple[int, ...], ...]
    pieces: tuple[tuple[tuple[Piece, ...], ...], ...]

    def send_numels(self, rank: int) -> list[int]:
        """Elements that ``rank`` sends to each rank."""
        return [sum(piece.numel for piece in pieces) for pieces in self.pieces[rank]]

    def receive_numels(self, rank: int) -> list[int]:
        """Elements that ``rank`` receives from each rank."""
        return [sum(piece.numel for piece in pieces[rank]) for pieces in self.pieces]

    def sent_by(self, rank: int) -> list[Piece]:
        """The pieces in the order in which ``rank`` lays them into its send buffer."""
        return [piece for pieces in self.pieces[rank] for piece in pieces]

    def received_by(self, rank: int) -> list[Piece]:
        """The pieces in the order in which they lie in the receive buffer of ``rank``."""
        return [piece for pieces in self.pieces for piece in pieces[rank]]


def plan_rounds(held: Sequence[Sequence[Piece]], round_numel: int) -> list[Round]:
    """Plans the exchange.

    Args:
        held: Per rank, its pieces.
        round_numel: Elements, over all ranks, that one round should not exceed (a single matrix may).

    Raises:
        ValueError: A matrix is not covered exactly once, or has fewer than 2 dimensions.
    """
    world_size = len(held)
    shapes: dict[int, tuple[int, ...]] = {}
    share: dict[int, list[int]] = {}
    by_rank: list[dict[int, list[Piece]]] = [{} for _ in range(world_size)]
    for rank, pieces in enumerate(held):
        for piece in sorted(pieces, key=lambda piece: (piece.index, piece.start)):
            shapes[piece.index] = piece.shape
            share.setdefault(piece.index, [0] * world_size)[rank] += piece.numel
            by_rank[rank].setdefault(piece.index, []).append(piece)
    _check_coverage(held)

    rounds = []
    for members in _rounds_of_indices(shapes, round_numel):
        owner = _assign_owners(members, shapes, share, world_size)
        owned = tuple(tuple(sorted(i for i in members if owner[i] == rank)) for rank in range(world_size))
        travelling = tuple(
            tuple(
                tuple(piece for index in owned[target] for piece in by_rank[source].get(index, ()))
                for target in range(world_size)
            )
            for source in range(world_size)
        )
        rounds.append(Round(owned, travelling))
    return rounds


def _rounds_of_indices(shapes: dict[int, tuple[int, ...]], round_numel: int) -> list[list[int]]:
    """Largest matrices first, so that those of one round are alike and balance well."""
    rounds: list[list[int]] = []
    filled = 0
    for index in sorted(shapes, key=lambda index: (-math.prod(shapes[index]), index)):
        numel = math.prod(shapes[index])
        if not rounds or filled + numel > round_numel:
            rounds.append([])
            filled = 0
        rounds[-1].append(index)
        filled += numel
    return rounds


def _assign_owners(
    members: list[int], shapes: dict[int, tuple[int, ...]], share: dict[int, list[int]], world_size: int
) -> dict[int, int]:
    """The rank with the largest part, unless that would give it more than its share; then the least loaded."""
    load = [0] * world_size
    fair = sum(math.prod(shapes[index]) for index in members) / world_size
    owner = {}
    for index in members:
        numel = math.prod(shapes[index])
        best = max(range(world_size), key=lambda rank: (share[index][rank], -load[rank], -rank))
        if load[best] and load[best] + numel > fair:
            best = min(range(world_size), key=lambda rank: (load[rank], -share[index][rank], rank))
        owner[index] = best
        load[best] += numel
    return owner


def _check_coverage(held: Sequence[Sequence[Piece]]) -> None:
    reached: dict[int, int] = {}
    ordered = sorted((piece for pieces in held for piece in pieces), key=lambda piece: (piece.index, piece.start))
    last: dict[int, Piece] = {}
    for piece in ordered:
        if len(piece.shape) < 2:
            raise ValueError(
                f"Muon orthogonalises matrices, but {piece.name} has shape {piece.shape}; put it in a "
                "group with use_muon=False"
            )
        if piece.start != reached.get(piece.index, 0):
            raise ValueError(
                f"{piece.name}: elements {reached.get(piece.index, 0)} to {piece.start} are held by no "
                "rank or by two; the segment tables of the ranks do not fit together"
            )
        reached[piece.index] = piece.stop
        last[piece.index] = piece
    for index, piece in last.items():
        if reached[index] != math.prod(piece.shape):
            raise ValueError(f"{piece.name}: the ranks hold {reached[index]} of its {math.prod(piece.shape)} elements")
