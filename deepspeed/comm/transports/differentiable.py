"""Collectives with gradients, on a ``comm.transports.channel.Channel``; the names are those of Megatron-LM.

What is the same on all ranks is *copied to* the part of a model that each rank has a shard of, and its gradient is
summed; summands are *reduced from* it, and the gradient passes unchanged (`Shoeybi et al.
<https://arxiv.org/abs/1909.08053>`_). Along a dimension *scatter* and *gather* are each other's backward; so are gather
and *reduce-scatter* where gradients are summands (`Korthikanti et al. <https://arxiv.org/abs/2205.05198>`_). The
backward of an *all-to-all* is the exchange in reverse.

Every rank of the channel must call a function, and run its backward, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from deepspeed.comm.transports.channel import Channel
from deepspeed.uncompiled import uncompiled

_Function = Callable[[torch.Tensor], torch.Tensor]


class _CollectiveFunction(torch.autograd.Function):
    """Applies one function to the values in the forward pass, and another one to the gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, run: _Function, run_back: _Function) -> torch.Tensor:
        ctx.run_back = run_back
        return run(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.run_back(gradient), None, None


@uncompiled
def copy_to(values: torch.Tensor, channel: Channel, label: str = "the gradient of an input") -> torch.Tensor:
    """Returns ``values``, equal on all ranks, for a computation that is divided over them; sums the gradient.

    The result has the shape and dtype of ``values`` (any shape).
    """
    if not (torch.is_grad_enabled() and values.requires_grad):
        return values
    return _CollectiveFunction.apply(values, lambda x: x.view_as(x), lambda gradient: _summed(gradient, channel, label))


@uncompiled
def reduce_from(values: torch.Tensor, channel: Channel, label: str = "the sum of an output") -> torch.Tensor:
    """Returns the sum over the ranks, for code that is the same on all of them; passes the gradient on.

    The result has the shape and dtype of ``values`` (any shape).
    """
    return _CollectiveFunction.apply(values, lambda x: _summed(x, channel, label), lambda gradient: gradient)


@uncompiled
def sum_over(values: torch.Tensor, channel: Channel, label: str) -> torch.Tensor:
    """Returns the sum over the ranks for computations that differ between them; sums the gradient too.

    The result has the shape and dtype of ``values`` (any shape).
    """
    back = f"the gradient of {label}"
    return _CollectiveFunction.apply(
        values, lambda x: _summed(x, channel, label), lambda gradient: _summed(gradient, channel, back)
    )


class UnequalParts(Protocol):
    """A division of a tensor over ranks other than into equal parts of one dimension, for example uneven parts."""

    def gather(self, values: torch.Tensor, channel: Channel, label: str) -> torch.Tensor:
        """Returns the whole tensor from the ranks' parts, which differ in one dimension. All ranks must call it."""
        ...

    def part(self, values: torch.Tensor, place: int) -> torch.Tensor:
        """Returns the part of rank ``place`` of the whole tensor ``values``, contiguous; of as many dimensions."""
        ...


@uncompiled
def gather_from(
    values: torch.Tensor,
    channel: Channel,
    dim: int | UnequalParts,
    *,
    is_partial: bool = False,
    label: str = "a sequence",
) -> torch.Tensor:
    """Returns the whole tensor; each rank passes its part.

    Parts lie one after the other along ``dim``, equally long, or as another division lays them out. With ``is_partial``
    (equal parts only) gradients are summands and are summed; else they are equal on all ranks, and each takes its part.
    """

    def back(gradient: torch.Tensor) -> torch.Tensor:
        if is_partial:
            assert isinstance(dim, int), "gradients that are summands are cut into equal parts"
            return channel.scatter_sum(gradient, dim, f"the gradient of {label}")
        return _part(gradient, channel, dim)

    return _CollectiveFunction.apply(values, lambda part: _whole(part, channel, dim, label), back)


@uncompiled
def scatter_to(
    values: torch.Tensor,
    channel: Channel,
    dim: int | UnequalParts,
    label: str = "the gradient of a cut sequence",
) -> torch.Tensor:
    """Returns this rank's part of ``values`` (any shape, equal on all ranks); the backward gathers the gradient.

    ``dim`` is cut into equal parts, so the number of ranks divides it; or it is another division.
    """
    return _CollectiveFunction.apply(
        values, lambda x: _part(x, channel, dim), lambda gradient: _whole(gradient, channel, dim, label)
    )


@uncompiled
def reduce_scatter_to(
    values: torch.Tensor, channel: Channel, dim: int, label: str = "the sum of an output"
) -> torch.Tensor:
    """Returns this rank's part along ``dim`` of the sum of ``values`` over the ranks; gathers the gradient.

    Shapes are equal on all ranks, whose number divides the dimension.
    """
    back = f"the gradient of {label}"
    return _CollectiveFunction.apply(
        values, lambda x: channel.scatter_sum(x, dim, label), lambda grad: channel.gather_along(grad, dim, back)
    )


class AllToAll(Protocol):
    """An exchange in which every rank sends pieces, of equal or unequal sizes, to every other one."""

    def run(self, *values: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Sends pieces of ``values`` and returns those that arrive, of any shapes; without autograd."""
        ...

    def reverse(self) -> AllToAll:
        """Returns the exchange of the gradients: from the shapes of what arrives to the shapes of what is sent."""
        ...


class _AllToAllFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: AllToAll, expected: object, *values: torch.Tensor) -> Any:
        ctx.exchange, ctx.expected = exchange, expected
        return exchange.run(*values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        found = all_to_all(ctx.exchange.reverse(), *gradients)
        ctx.expected = None
        return (None, None, *(found if isinstance(found, tuple) else (found,)))


@uncompiled
def all_to_all(exchange: AllToAll, *values: torch.Tensor, expected: object = None) -> Any:
    """Returns what arrives in an exchange; the backward sends the gradients back.

    It sends ``values`` (any shapes) and returns what ``exchange.run`` does, and needs no copy of its own: pieces are
    where ``exchange`` lays them out. ``expected`` is kept until the backward is over, such as a token of
    ``comm.job.backward_comm.note``.
    """
    return _AllToAllFunction.apply(exchange, expected, *values)


# -- tensors without gradients ---------------------------------------------------------------------------------------


def _summed(values: torch.Tensor, channel: Channel, label: str) -> torch.Tensor:
    # In a copy: the sum may be made in its memory.
    return channel.sum(values.detach().clone(memory_format=torch.contiguous_format), label)


def _whole(values: torch.Tensor, channel: Channel, dim: int | UnequalParts, label: str) -> torch.Tensor:
    return channel.gather_along(values, dim, label) if isinstance(dim, int) else dim.gather(values, channel, label)


def _part(values: torch.Tensor, channel: Channel, dim: int | UnequalParts) -> torch.Tensor:
    if isinstance(dim, int):
        return values.chunk(channel.size, dim)[channel.rank].contiguous()
    return dim.part(values, channel.rank)
