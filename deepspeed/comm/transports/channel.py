"""Sums, gathers and scattered sums of activations over the ranks of one axis.

All transfers go through a transport of the job (``comm.transports.transport``): the watch names ranks that take
another branch, as in any other wait, and traffic is counted under the axis. The bits of a sum are
equal on all ranks. ``comm.transports.differentiable`` has the same with gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from deepspeed.comm.transports.transport import Reduction, TensorTransfer, Transport, transfer_key
from deepspeed.errors import DeepSpeedConfigError

_SUM = 1  # kind of transfer, see transfer_key
_GATHER = 0

_MOST_ROWS = 16
"""Indices of the dimensions before a cut one, up to which each is a transfer of its own; else parts are copied."""


class PendingSum(Protocol):
    """A sum in flight."""

    def wait(self) -> torch.Tensor:
        """Returns the sum: shaped like the summand, no view of another tensor. May be called again."""


class _KnownSum:
    """A transfer whose result tensor is known at the start, with the tensor it is copied from, if another."""

    def __init__(self, work: Any, result: torch.Tensor, arrives: torch.Tensor | None = None) -> None:
        self._work = work
        self._result = result
        self._arrives = arrives

    def wait(self) -> torch.Tensor:
        """Returns the sum: shaped like the summand, no view of another tensor. May be called again."""
        self._work.wait()
        if self._arrives is not None:
            self._result.view(-1).copy_(self._arrives)
            self._arrives = None
        return self._result


class SumBackend(Protocol):
    """Interface of sums that are faster than the transport's where all ranks are on one host."""

    def serves(self, numel: int, dtype: torch.dtype) -> bool:
        """Returns whether this backend sums ``numel`` elements of ``dtype``; the same on all ranks."""

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns where the summand of the next sum may be written."""

    def start(self, values: torch.Tensor, label: str) -> PendingSum:
        """Starts the sum of ``values`` (any shape, equal on all ranks) over the ranks."""


class Channel:
    """Sums and gathers over the ranks of one axis. All of them must make the same calls in the same order."""

    def __init__(self, transport: Transport, sums: SumBackend | None = None) -> None:
        self._transport = transport
        self._sums = sums  # where all ranks are on one host; None: sums too go through the transport
        self.rank = transport.rank  # this rank's place among them
        self.size = transport.size  # the number of ranks
        self._count = 0

    def __deepcopy__(self, memo: Any) -> Channel:
        return self  # a copied model communicates with the same ranks

    @property
    def transport(self) -> Transport:
        """The transport, for small exchanges and first values."""
        return self._transport

    def reconnect(self, made: Channel, *, moves: bool = False) -> None:
        """Switches this channel to ``made``'s job, in place, so that layers that hold it need no change.

        ``made`` has as many ranks and the same place of this rank, unless it ``moves``; it must not be used afterwards.

        Raises:
            DeepSpeedConfigError: The number of ranks or the place of this one differs.
        """
        if moves:
            self.rank, self.size = made.rank, made.size
        if (made.rank, made.size) != (self.rank, self.size):
            raise DeepSpeedConfigError(
                f"the model was cut as part {self.rank} of {self.size}, but this rank is number {made.rank} of the "
                f"{made.size} ranks that share its layers now; build the model again"
            )
        self._transport, self._sums, self._count = made._transport, made._sums, 0

    def place(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Returns memory of this shape to compute a summand in, so that :meth:`sum` need not copy it.

        It is contiguous, uninitialized, and valid for the next :meth:`start_sum` only.
        """
        if self._sums is not None and self._sums.serves(math.prod(shape), like.dtype):
            return self._sums.place(shape, like.dtype)
        return like.new_empty(shape)

    def start_sum(self, values: torch.Tensor, label: str) -> PendingSum:
        """Begins to sum ``values`` over the ranks; the result has their shape and dtype.

        They are contiguous, floating, and no view, unless from :meth:`place`. The caller must not use them afterwards.
        """
        if self._sums is not None and self._sums.serves(values.numel(), values.dtype):
            return self._sums.start(values, label)
        flat = values.view(-1)
        in_place = self._transport.sum_in_place(flat, label)
        if in_place is not None:
            return _KnownSum(in_place, values)
        numel = flat.numel()
        # Two ranks exchange whole tensors; more ranks reduce slices, which must be of equal length.
        if self.size > 2 and numel % self.size:
            padded = flat.new_zeros(-(-numel // self.size) * self.size)
            padded[:numel].copy_(flat)
            flat = padded
        overwrites = self._transport.needs_one_order or (self.size == 2 and flat.dtype == torch.float32)
        out = flat if overwrites or self.size == 1 else torch.empty_like(flat)
        how = Reduction(1.0, self._key(_SUM), label, max(flat.numel() * self.size, 1))
        work = self._transport.all_reduce(flat, out, how)
        return _KnownSum(work, values, None if out.data_ptr() == values.data_ptr() else out[:numel])

    def sum(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """Returns the sum of ``values`` over the ranks, in their shape; ``values`` may be overwritten."""
        return self.start_sum(values.contiguous(), label).wait()

    def gather(self, values: torch.Tensor, lengths: Sequence[int], label: str) -> list[torch.Tensor]:
        """Gathers ``values`` of all ranks. Their last dimension may differ: ``lengths`` has its size on each rank."""
        head, mine = values.shape[:-1], values.contiguous()
        if len(set(lengths)) == 1:
            rows = values.new_empty((self.size, *values.shape))
            rows[self.rank].copy_(mine)
            self._transport.all_gather(rows.view(-1), key=self._key(_GATHER), label=label).wait()
            return list(rows.unbind(0))
        parts = [mine if place == self.rank else values.new_empty((*head, n)) for place, n in enumerate(lengths)]
        transfers = [TensorTransfer(place, None, part.view(-1)) for place, part in enumerate(parts)]
        self._transport.move(transfers, label=label)
        return parts

    def largest(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """Returns the elementwise largest of every rank's ``values``, in their shape; for small tensors."""
        return torch.stack(self.gather(values.reshape(-1), [values.numel()] * self.size, label)).amax(0).view_as(values)

    def gather_along(self, values: torch.Tensor, dim: int, label: str) -> torch.Tensor:
        """Returns every rank's ``values`` (equal shapes), one after the other along ``dim``; contiguous."""
        rows = values.reshape(values.shape[:dim].numel(), values.shape[dim:].numel())
        if len(rows) > _MOST_ROWS:
            return torch.cat(self.gather(values, [values.shape[-1]] * self.size, label), dim=dim)
        whole = rows.new_empty((len(rows), self.size, rows.shape[1]))
        whole[:, self.rank].copy_(rows)
        works = [self._transport.all_gather(row.view(-1), key=self._key(_GATHER), label=label) for row in whole]
        for work in works:
            work.wait()
        return whole.view(*values.shape[:dim], self.size * values.shape[dim], *values.shape[dim + 1 :])

    def scatter_sum(self, values: torch.Tensor, dim: int, label: str) -> torch.Tensor:
        """Returns this rank's part, along ``dim``, of the sum of ``values``, whose shapes are equal on all ranks.

        The number of ranks divides the dimension.
        """
        rows = values.reshape(values.shape[:dim].numel(), values.shape[dim:].numel())
        if len(rows) > _MOST_ROWS:
            rows = torch.stack(values.chunk(self.size, dim)).view(1, -1)
        rows = rows.contiguous()
        out = rows.new_empty((len(rows), rows.shape[1] // self.size))
        works = []
        for row, part in zip(rows, out, strict=True):
            how = Reduction(1.0, self._key(_SUM), label, max(row.numel(), 1))
            works.append(self._transport.reduce_scatter(row, part, how))
        for work in works:
            work.wait()
        return out.view(*values.shape[:dim], values.shape[dim] // self.size, *values.shape[dim + 1 :])

    def _key(self, kind: int) -> int:
        self._count += 1
        return transfer_key(self._transport.owner, 0, kind, self._count)
