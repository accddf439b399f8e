"""Muon's matrix step when matrices are cut anywhere over the ranks.

Momentum is elementwise and stays where the fragments are. The update of each matrix is gathered to its owner,
orthogonalised there, and the fragments are sent back: two exchanges per round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.exchange import exchange_device, exchange_parts
from deepspeed.ops.muon.plan import MatrixSegment, MuonRound, heaviest_position, plan_rounds
from deepspeed.ops.segments import Segment, SegmentTable, SharedTensor

#: Elements per rank and round: bounds each of the two exchange buffers at 256 MiB of fp32.
ROUND_NUMEL_PER_RANK = 1 << 26


@dataclass(frozen=True)
class _PieceInterval:
    """Where a piece lies on this rank."""

    run: Tensor
    segment: Segment


class _ExchangeRound:
    """One round as this rank takes part in it.

    Attributes:
        sent: Its pieces, in the order in which they lie in the send buffer.
        received: Pieces of the matrices it orthogonalises, in the order in which they lie in the receive buffer.
        send_numels: Elements for each rank.
        receive_numels: Elements from each rank.
    """

    def __init__(self, planned: MuonRound, table: SegmentTable) -> None:
        def by_rank(piece: MatrixSegment) -> tuple[int, int]:
            return table.ranks[piece.peer], piece.tensor.index

        self.sent = sorted(planned.sent_by(table.position), key=by_rank)
        self.received = sorted(planned.received_by(table.position), key=by_rank)
        self.send_numels = self._numels(self.sent, table)
        self.receive_numels = self._numels(self.received, table)

    @staticmethod
    def _numels(pieces: list[MatrixSegment], table: SegmentTable) -> list[int]:
        numels = [0] * len(table.ranks)
        for piece in pieces:
            numels[table.ranks[piece.peer]] += piece.numel
        return numels


class FragmentExchange:
    """Gathers and returns the matrices of a segment table.

    Each matrix of a stack has an owner of its own. Those of one stack that a rank owns are orthogonalised together.

    Every rank of the table's group must construct it with the same matrices; nothing is exchanged for that.

    Attributes:
        heaviest_rank: The rank in the group that needs most memory for a step; None without matrices.

    Args:
        table: Which matrix pieces the runs hold.
        runs: The runs of the matrix groups.
        groups: Indices of the matrix groups.
        stacks: Those of them whose tensors are stacks of matrices.

    Raises:
        ValueError: The same on every rank: a tensor that is no matrix. On this rank: the runs do not hold what the
            table says of its position.
    """

    def __init__(
        self, table: SegmentTable, runs: list[Tensor], groups: Collection[int], stacks: Collection[int] = ()
    ) -> None:
        self._group, self._axis = table.group, table.axis
        self._device = exchange_device(runs, table.group)
        matrices: list[SharedTensor] = []
        self._stack_of: dict[int, int] = {}
        by_tensor: dict[int, list[SharedTensor]] = {}
        for tensor in table.shared:
            if tensor.param_group in groups:
                is_stack = tensor.param_group in stacks
                found = _matrices_of(tensor, len(matrices), is_stack=is_stack)
                by_tensor[tensor.index] = found
                matrices += found
                if is_stack:
                    self._stack_of.update((matrix.index, tensor.index) for matrix in found)
        self._locations = {
            part.index: _PieceInterval(run, part)
            for run in runs
            for segment in table.of(run)
            if segment.numel
            for part in _matrix_segments(segment, by_tensor.get(segment.index, []))
        }
        planned = plan_rounds(matrices, len(table.ranks), ROUND_NUMEL_PER_RANK * len(table.ranks))
        self._tours = [_ExchangeRound(members, table) for members in planned]
        heaviest = heaviest_position(planned)
        self.heaviest_rank = None if heaviest is None else table.ranks[heaviest]
        self._check_locations()

    def _check_locations(self) -> None:
        wanted = {
            piece.tensor.index: (piece.start, piece.stop)
            for exchange_round in self._tours
            for piece in exchange_round.sent
        }
        present = {
            index: (location.segment.tensor_start, location.segment.tensor_stop)
            for index, location in self._locations.items()
        }
        wrong = sorted(index for index in wanted.keys() | present.keys() if wanted.get(index) != present.get(index))
        if wrong:
            raise ValueError(
                f"Muon: of matrix {wrong[0]} the runs of the matrix groups hold the elements {present.get(wrong[0])}, "
                f"but the segment table says {wanted.get(wrong[0])}; attach_segments must be called again after the "
                "runs have changed"
            )

    def step(
        self,
        update_of: Callable[[Tensor, slice], Tensor],
        orthogonalize: Callable[..., Tensor],
        apply: Callable[[Tensor, slice, Tensor, tuple[int, ...]], None],
    ) -> None:
        """One step of all matrices. Every rank must call it.

        Args:
            update_of: ``(run, elements) -> `` fp32 update of those elements, before orthogonalising.
            orthogonalize: Matrix in its full shape to matrix; of a stack, 3-D, to a stack.
            apply: ``(run, elements, orthogonalised update, full shape)``: changes the weights.
        """
        for exchange_round in self._tours:
            self._run(exchange_round, update_of, orthogonalize, apply)

    def _run(self, exchange_round: _ExchangeRound, update_of: Any, orthogonalize: Any, apply: Any) -> None:
        pieces = torch.empty(sum(exchange_round.send_numels), dtype=torch.float32, device=self._device)
        for piece, view in zip(exchange_round.sent, _views(pieces, exchange_round.sent), strict=True):
            location = self._locations[piece.tensor.index]
            view.copy_(update_of(location.run, slice(location.segment.start, location.segment.stop)))

        matrices = pieces if self._group is None else pieces.new_empty(sum(exchange_round.receive_numels))
        self._exchange(matrices, pieces, (exchange_round.receive_numels, exchange_round.send_numels))
        self._orthogonalize_all(
            list(zip(exchange_round.received, _views(matrices, exchange_round.received), strict=True)), orthogonalize
        )
        self._exchange(pieces, matrices, (exchange_round.send_numels, exchange_round.receive_numels))

        for piece, view in zip(exchange_round.sent, _views(pieces, exchange_round.sent), strict=True):
            location = self._locations[piece.tensor.index]
            apply(location.run, slice(location.segment.start, location.segment.stop), view, piece.tensor.shape)

    def _exchange(self, incoming: Tensor, outgoing: Tensor, numels: tuple[list[int], list[int]]) -> None:
        if self._group is not None:
            exchange_parts(incoming, outgoing, numels, self._group, "the matrices of Muon", self._axis)

    def _orthogonalize_all(
        self, pieces: list[tuple[MatrixSegment, Tensor]], orthogonalize: Callable[..., Tensor]
    ) -> None:
        """Puts each matrix together, orthogonalises it, and writes the result back over its pieces."""
        by_matrix: dict[int, list[tuple[MatrixSegment, Tensor]]] = {}
        for piece, view in pieces:
            by_matrix.setdefault(piece.tensor.index, []).append((piece, view))
        stacks: dict[int, list[list[tuple[MatrixSegment, Tensor]]]] = {}
        for index, parts in by_matrix.items():
            parts.sort(key=lambda part: part[0].start)
            if index in self._stack_of:
                stacks.setdefault(self._stack_of[index], []).append(parts)
            else:
                _write_back(parts, orthogonalize(_joined(parts)))
        for members in stacks.values():
            found = orthogonalize(torch.stack([_joined(parts) for parts in members]), is_stack=True)
            for parts, matrix in zip(members, found, strict=True):
                _write_back(parts, matrix)


def _matrices_of(tensor: SharedTensor, first: int, *, is_stack: bool) -> list[SharedTensor]:
    """Returns the matrices of a tensor, numbered from ``first`` on."""
    if not is_stack:
        return [replace(tensor, index=first)]
    shape = tensor.shape[-2:]
    numel = shape[0] * shape[1]
    return [
        replace(tensor, index=first + number, shape=shape, start=tensor.start + number * numel)
        for number in range(tensor.numel // numel)
    ]


def _matrix_segments(segment: Segment, matrices: list[SharedTensor]) -> Iterator[Segment]:
    """Cuts a piece of a tensor, which is not empty, at the ends of its matrices."""
    numel = matrices[0].numel if matrices else 0
    for number in range(segment.tensor_start // numel, -(-segment.tensor_stop // numel)) if numel else ():
        first, last = max(segment.tensor_start, number * numel), min(segment.tensor_stop, (number + 1) * numel)
        start = segment.start + first - segment.tensor_start
        matrix = matrices[number]
        yield replace(
            segment,
            index=matrix.index,
            start=start,
            stop=start + last - first,
            tensor_start=first - number * numel,
            shape=matrix.shape,
        )


def _joined(parts: list[tuple[MatrixSegment, Tensor]]) -> Tensor:
    """Returns a matrix of which all parts are given in order."""
    return torch.cat([view for _, view in parts]).view(parts[0][0].tensor.shape)


def _write_back(parts: list[tuple[MatrixSegment, Tensor]], matrix: Tensor) -> None:
    flat = matrix.reshape(-1)
    for piece, view in parts:
        view.copy_(flat[piece.start : piece.stop])


def _views(buffer: Tensor, pieces: list[MatrixSegment]) -> tuple[Tensor, ...]:
    return buffer.split([piece.numel for piece in pieces]) if pieces else ()
