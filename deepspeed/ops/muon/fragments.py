"""Muon's matrix step when matrices are cut anywhere over the ranks.

Momentum is elementwise and stays where the fragments are. The update of each matrix is gathered to its owner,
orthogonalised there, and the fragments are sent back: two exchanges per round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.exchange import exchange_device
from deepspeed.ops.muon.plan import Piece, Round, plan_rounds
from deepspeed.ops.segments import Segment, SegmentTable

#: Elements per rank and round: bounds each of the two exchange buffers at 256 MiB of fp32.
ROUND_NUMEL_PER_RANK = 1 << 26


@dataclass(frozen=True)
class _Location:
    """Where a piece lies on this rank."""

    run: Tensor
    segment: Segment


class FragmentExchange:
    """Gathers and returns the matrices of a segment table.

    Every rank of the table's group must construct it together.

    Args:
        table: Which matrix pieces the runs hold.
        runs: The runs of the matrix groups.

    Raises:
        ValueError: The same on every rank: a tensor that is no matrix, or pieces that do not make up whole matrices.
    """

    def __init__(self, table: SegmentTable, runs: list[Tensor]) -> None:
        self._group = table.group
        self._device = exchange_device(runs, table.group)
        self._locations = {
            (segment.index, segment.tensor_start): _Location(run, segment)
            for run in runs
            for segment in table.of(run)
            if segment.numel
        }
        mine = [
            Piece(segment.index, segment.tensor_start, segment.tensor_stop, segment.shape, segment.name)
            for segment in (location.segment for location in self._locations.values())
        ]
        held = [mine]
        self._rank = 0
        if table.group is not None:
            from deepspeed import comm

            self._rank = comm.get_rank(group=table.group)
            held = [[] for _ in range(comm.get_world_size(group=table.group))]
            comm.all_gather_object(held, mine, group=table.group)
        self._rounds = plan_rounds(held, ROUND_NUMEL_PER_RANK * len(held))

    @property
    def owned(self) -> list[int]:
        """The numbers of the matrices this rank orthogonalises."""
        return sorted(index for planned in self._rounds for index in planned.owned[self._rank])

    def step(
        self,
        update_of: Callable[[Tensor, slice], Tensor],
        orthogonalize: Callable[[Tensor], Tensor],
        apply: Callable[[Tensor, slice, Tensor, tuple[int, ...]], None],
    ) -> None:
        """One step of all matrices. Every rank must call it.

        Args:
            update_of: ``(run, elements) -> `` fp32 update of those elements, before orthogonalising.
            orthogonalize: Matrix in its full shape to matrix.
            apply: ``(run, elements, orthogonalised update, full shape)``: changes the weights.
        """
        for planned in self._rounds:
            self._run_round(planned, update_of, orthogonalize, apply)

    def _run_round(self, planned: Round, update_of: Any, orthogonalize: Any, apply: Any) -> None:
        send_numels, receive_numels = planned.send_numels(self._rank), planned.receive_numels(self._rank)
        outgoing = torch.empty(sum(send_numels), dtype=torch.float32, device=self._device)
        sent = list(zip(planned.sent_by(self._rank), _views(outgoing, planned.sent_by(self._rank)), strict=True))
        for piece, view in sent:
            location = self._locations[piece.index, piece.start]
            view.copy_(update_of(location.run, slice(location.segment.start, location.segment.stop)))

        incoming = self._exchange(outgoing, send_numels, receive_numels)
        received = planned.received_by(self._rank)
        self._orthogonalize_all(list(zip(received, _views(incoming, received), strict=True)), orthogonalize)

        returned = self._exchange(incoming, receive_numels, send_numels)
        for (piece, _), view in zip(sent, _views(returned, [piece for piece, _ in sent]), strict=True):
            location = self._locations[piece.index, piece.start]
            apply(location.run, slice(location.segment.start, location.segment.stop), view, piece.shape)

    def _exchange(self, outgoing: Tensor, send_numels: list[int], receive_numels: list[int]) -> Tensor:
        if self._group is None:
            return outgoing
        from deepspeed import comm

        incoming = outgoing.new_empty(sum(receive_numels))
        comm.all_to_all_single(incoming, outgoing, receive_numels, send_numels, group=self._group)
        return incoming

    @staticmethod
    def _orthogonalize_all(pieces: list[tuple[Piece, Tensor]], orthogonalize: Callable[[Tensor], Tensor]) -> None:
        """Puts each matrix together, orthogonalises it, and writes the result back over its pieces."""
        by_matrix: dict[int, list[tuple[Piece, Tensor]]] = {}
        for piece, view in pieces:
            by_matrix.setdefault(piece.index, []).append((piece, view))
        for parts in by_matrix.values():
            parts.sort(key=lambda part: part[0].start)
            shape = parts[0][0].shape
            flat = orthogonalize(torch.cat([view for _, view in parts]).view(shape)).reshape(-1)
            for piece, view in parts:
                view.copy_(flat[piece.start : piece.stop])


def _views(buffer: Tensor, pieces: list[Piece]) -> tuple[Tensor, ...]:
    return buffer.split([piece.numel for piece in pieces]) if pieces else ()
