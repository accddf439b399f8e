"""Operations of cut layers on activations, beyond those in ``comm.transports.differentiable``.

Gradients of an input that several layers share are summed once. Parts along the last dimension may be uneven or not
contiguous (``split``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from deepspeed.comm.transports.channel import Channel, PendingSum
from deepspeed.parallel.tensor.split import Split, widths
from deepspeed.uncompiled import uncompiled


class SharedInput:
    """One input of cut layers and the gradients that they send back to it, which are summed over the ranks once.

    Every layer adds its part of the gradient. The last one starts the sum over ranks, and computes the gradient of its
    weight meanwhile. If one of the layers is not part of a backward, the sum runs where the input entered.
    """

    def __init__(self, channel: Channel, label: str, on_backward: Callable[[SharedInput], None]) -> None:
        self.channel = channel
        self._label = label
        self._on_backward = on_backward  # called when the first gradient arrives
        self.users = 0  # number of layers that use the input
        self.is_open = True  # no gradient has arrived yet, so a layer may still join
        self._arrived = 0
        self._sum: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor, weight: torch.Tensor) -> PendingSum | None:
        """Adds ``gradient @ weight``, both 2-D; starts the sum over ranks if no other user is expected."""
        if self._expects_more():
            self._sum = gradient @ weight if self._sum is None else self._sum.addmm_(gradient, weight)
            return None
        earlier, self._sum = self._sum, None
        values = self.channel.place((gradient.shape[0], weight.shape[1]), gradient)
        if earlier is None:
            torch.mm(gradient, weight, out=values)
        else:
            torch.addmm(earlier, gradient, weight, out=values)
        return self.channel.start_sum(values, self._label)

    def add_product(self, product: torch.Tensor) -> PendingSum | None:
        """Does the same as :meth:`add` with a product, 2-D, which it may overwrite."""
        total = product if self._sum is None else self._sum.add_(product)
        if self._expects_more():
            self._sum = total
            return None
        self._sum = None
        return self.channel.start_sum(self.channel.place(total.shape, total).copy_(total), self._label)

    def _expects_more(self) -> bool:
        """Counts one gradient; returns whether other users have not added theirs."""
        if self.is_open:
            self.is_open = False
            self._on_backward(self)
        self._arrived = (self._arrived + 1) % max(self.users, 1)
        return self._arrived > 0

    def settle(self, gradient: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
        """Returns the whole gradient of the input, of ``shape``, once the backward of all its users is over."""
        if self._sum is None:
            return gradient
        values, self._sum, self._arrived = self._sum, None, 0
        total = self.channel.sum(values, self._label).view(shape)
        return total if gradient is None else total + gradient


class _EnterShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, shared: SharedInput) -> torch.Tensor:
        ctx.shared = shared
        ctx.shape = values.shape
        ctx.set_materialize_grads(False)
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return ctx.shared.settle(gradient, ctx.shape), None


@uncompiled
def enter_shared(values: torch.Tensor, shared: SharedInput) -> torch.Tensor:
    """Returns a view of ``values`` (any shape) for layers that add their gradients to ``shared``."""
    return _EnterShared.apply(values, shared)


@dataclass(frozen=True)
class SplitParts:
    """Parts along the last dimension as in a :class:`Split`, uneven or not contiguous."""

    split: Split  # how the last dimension is split

    def gather(self, values: torch.Tensor, channel: Channel, label: str) -> torch.Tensor:
        """Returns the whole, ``[..., extent]``, from every rank's part ``[..., width of the rank]``."""
        return join(channel.gather(values.contiguous(), widths(self.split), label), self.split)

    def part(self, values: torch.Tensor, place: int) -> torch.Tensor:
        """Returns a rank's part, ``[..., width of the rank]``, contiguous, of ``[..., extent]``."""
        parts = [values[..., low:high] for low, high in self.split.intervals(place)]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=-1)


def join(parts: list[torch.Tensor], split: Split) -> torch.Tensor:
    """Returns the whole, along the last dimension, from every rank's part."""
    if all(len(split.intervals(place)) == 1 for place in range(split.size)) and split.heads is None:
        return torch.cat(parts, dim=-1)
    whole = parts[0].new_empty((*parts[0].shape[:-1], split.extent))
    for place, part in enumerate(parts):
        first = 0
        for low, high in split.intervals(place):
            whole[..., low:high] = part[..., first : first + high - low]
            first += high - low
    return whole
