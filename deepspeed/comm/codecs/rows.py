"""Sparse reductions: send only the nonzero rows of a buffer, with their numbers.

The gradient of an embedding is zero in every row that no sample uses. Each rank sends the numbers and values of its
nonzero rows; they are summed in rank order in the dtype of the result, as in a dense reduction. If the rows of all
ranks would take more bytes than a dense reduction, that is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from deepspeed.comm.base.zero_rows import ZeroRows
from deepspeed.comm.transports.transport import LocalTransport, Reduction, Transport, Work
from deepspeed.logging import log_dist_once

_NUMBER_BYTES = 8


def by_rows(plain: Transport) -> Transport:
    """Returns ``plain`` with reductions by rows; ``plain`` itself where nothing is sent."""
    return plain if isinstance(plain, LocalTransport) else RowTransport(plain)


class RowTransport(Transport):
    """Reduces nonzero rows through ``plain``; other operations must use ``plain``.

    The exchange takes place in ``wait``, so all ranks must wait for these reductions in one order.
    """

    name = "rows"

    def __init__(self, plain: Transport) -> None:
        super().__init__(None, plain.rank, plain.size)  # not watched: a watched transport would be closed with the job
        self.needs_one_order = plain.needs_one_order
        self.plain = plain

    @override
    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        return _RowReduction(self.plain, flat, out, how, to_owner=True)

    @override
    def all_reduce(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        return _RowReduction(self.plain, flat, out, how, to_owner=False)


@dataclass
class _RowReduction:
    """One reduction. All ranks must wait for it in the same order."""

    plain: Transport  # carries the bytes
    flat: torch.Tensor | None  # what is summed, 1-D
    out: torch.Tensor  # where the sum, or this rank's slice of it, goes, 1-D
    how: Reduction  # scale, rows and the like
    to_owner: bool  # every rank gets its slice only

    def will_arrive(self) -> bool:
        """Returns whether waiting needs no further call: the exchange is made in :meth:`wait`."""
        return self.flat is None

    def wait(self) -> None:
        """Exchanges the rows and sums them. Every rank must call it; later calls return at once."""
        if self.flat is None:
            return
        flat, self.flat = self.flat, None
        rows = self.how.rows
        assert rows is not None
        numbers = rows.numbers(flat)
        mine = rows.per_slice(numbers)
        if not self.to_owner:
            mine = [(sum(count for count, _ in mine), sum(numel for _, numel in mine))]
        table = self.plain.gather_small(torch.tensor(mine).view(-1), channel="call", label=self.how.label)
        table = table.view(self.plain.size, -1, 2)  # [sender, receiver, (rows, elements)]
        if self._is_dense(table, flat):
            log_dist_once(
                f"sparse_gradients: {self.how.label} is sent whole, since its non-zero rows would take more "
                "bytes. An embedding that is tied to the output layer has gradients in every row"
            )
            reduce = self.plain.reduce_scatter if self.to_owner else self.plain.all_reduce
            reduce(flat, self.out, self.how).wait()
            return
        self._sum(table, numbers, flat, rows)

    def _is_dense(self, table: torch.Tensor, flat: torch.Tensor) -> bool:
        """Returns whether the whole buffer takes fewer bytes than the rows; the same on all ranks."""
        counts, numels = table.sum((0, 1)).tolist()
        size = self.plain.size
        sent = (counts * _NUMBER_BYTES + numels * flat.itemsize) * (size - 1)
        whole = flat.nbytes * (size - 1) * (1 if self.to_owner else 2)
        return bool((sent if not self.to_owner else sent // size) >= whole)

    def _sum(self, table: torch.Tensor, numbers: torch.Tensor, flat: torch.Tensor, rows: ZeroRows) -> None:
        plain = self.plain
        values = flat[rows.elements(numbers)]
        if self.to_owner:
            sent, received = table[plain.rank], table[:, plain.rank]
        else:
            sent, received = table[plain.rank].expand(plain.size, 2), table[:, 0]
            numbers, values = numbers.repeat(plain.size), values.repeat(plain.size)
        all_numbers = self._exchange(numbers, sent[:, 0], received[:, 0])
        all_values = self._exchange(values, sent[:, 1], received[:, 1])
        first = plain.rank * self.out.numel() if self.to_owner else 0
        out = self.out.zero_()
        by_rank = (all_numbers.split(received[:, 0].tolist()), all_values.split(received[:, 1].tolist()))
        for their_numbers, their_values in zip(*by_rank, strict=True):
            places = rows.elements(their_numbers) - first
            out[places] += their_values.to(out.dtype)
        if self.how.scale != 1.0:
            out.mul_(self.how.scale)
        if self.how.visit is not None:
            self.how.visit(out)

    def _exchange(self, values: torch.Tensor, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        out = values.new_empty(int(received.sum()))
        self.plain.all_to_all(values, sent.tolist(), out, received.tolist(), label=self.how.label).wait()
        return out
