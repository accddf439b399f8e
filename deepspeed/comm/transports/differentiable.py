"""Collectives with gradients, on a ``comm.transports.channel.Channel``; the names are those of Megatron-LM.

What is the same on all ranks is *copied to* the part of a model that each rank has a shard of, and its gradient is
summed; summands are *reduced from* it, and the gradient passes unchanged (`Shoeybi et al.
<https://arxiv.org/abs/1909.08053>`_). Along a dimension *scatter* and *gather* are each other's backward; so are gather
and *reduce-scatter* where gradients are summands (`Korthikanti et al. <https://arxiv.org/abs/2205.05198>`_).

Every rank of the channel must call a function, and run its backward, in the same order.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from deepspeed.comm.transports.channel import Channel
from deepspeed.uncompiled import uncompiled


class _CopyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, channel: Channel, label: str) -> torch.Tensor:
        ctx.channel, ctx.label = channel, label
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _summed(gradient, ctx.channel, ctx.label), None, None


@uncompiled
def copy_to(values: torch.Tensor, channel: Channel, label: str = "the gradient of an input") -> torch.Tensor:
    """Returns ``values``, equal on all ranks, for a computation that is divided over them; sums the gradient.

    The result has the shape and dtype of ``values`` (any shape).
    """
    if not (torch.is_grad_enabled() and values.requires_grad):
        return values
    return _CopyFunction.apply(values, channel, label)


class _ReduceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, channel: Channel, label: str) -> torch.Tensor:
        return _summed(values, channel, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None


@uncompiled
def reduce_from(values: torch.Tensor, channel: Channel, label: str = "the sum of an output") -> torch.Tensor:
    """Returns the sum over the ranks, for code that is the same on all of them; passes the gradient on.

    The result has the shape and dtype of ``values`` (any shape).
    """
    return _ReduceFunction.apply(values, channel, label)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, channel: Channel, label: str) -> torch.Tensor:
        ctx.channel, ctx.label = channel, label
        return _summed(values, channel, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _summed(gradient, ctx.channel, f"the gradient of {ctx.label}"), None, None


@uncompiled
def sum_over(values: torch.Tensor, channel: Channel, label: str) -> torch.Tensor:
    """Returns the sum over the ranks for computations that differ between them; sums the gradient too.

    The result has the shape and dtype of ``values`` (any shape).
    """
    return _Sum.apply(values, channel, label)


class UnequalParts(Protocol):
    """A division of a tensor over ranks other than into equal parts of one dimension, for example uneven parts."""

    def gather(self, values: torch.Tensor, channel: Channel, label: str) -> torch.Tensor:
        """Returns the whole tensor from the ranks' parts, which differ in one dimension. All ranks must call it."""
        ...

    def part(self, values: torch.Tensor, place: int) -> torch.Tensor:
        """Returns the part of rank ``place`` of the whole tensor ``values``, contiguous; of as many dimensions."""
        ...


class _GatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, channel: Channel, dim: int | UnequalParts, is_partial: bool, label: str
    ) -> torch.Tensor:
        ctx.channel, ctx.dim, ctx.is_partial, ctx.label = channel, dim, is_partial, label
        return _whole(values, channel, dim, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        if ctx.is_partial:
            mine = scatter_along(gradient, ctx.channel, ctx.dim, f"the gradient of {ctx.label}")
        else:
            mine = _part(gradient, ctx.channel, ctx.dim)
        return mine, None, None, None, None


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

    Args:
        values: This rank's part.
        channel: The ranks.
        dim: The dimension along which equally long parts lie one after the other; or what divides otherwise.
        is_partial: Gradients are summands and are summed; False: they are equal on all ranks, and each takes its part.
            Equal parts only.
        label: What is transferred.
    """
    return _GatherFunction.apply(values, channel, dim, is_partial, label)


class _ScatterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, channel: Channel, dim: int | UnequalParts, label: str) -> torch.Tensor:
        ctx.channel, ctx.dim, ctx.label = channel, dim, label
        return _part(values, channel, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _whole(gradient, ctx.channel, ctx.dim, ctx.label), None, None, None


@uncompiled
def scatter_to(
    values: torch.Tensor,
    channel: Channel,
    dim: int | UnequalParts,
    label: str = "the gradient of a cut sequence",
) -> torch.Tensor:
    """Returns this rank's part of a tensor that all ranks have; the backward gathers the gradient.

    Args:
        values: Any shape, equal on all ranks.
        channel: The ranks.
        dim: The dimension that is cut into equal parts, which the number of ranks divides; or what divides otherwise.
        label: What is transferred in the backward pass.
    """
    return _ScatterFunction.apply(values, channel, dim, label)


class _ReduceScatterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, channel: Channel, dim: int, label: str) -> torch.Tensor:
        ctx.channel, ctx.dim, ctx.label = channel, dim, label
        return scatter_along(values, channel, dim, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gather_along(gradient, ctx.channel, ctx.dim, f"the gradient of {ctx.label}"), None, None, None


@uncompiled
def reduce_scatter_to(
    values: torch.Tensor, channel: Channel, dim: int, label: str = "the sum of an output"
) -> torch.Tensor:
    """Returns this rank's part along ``dim`` of the sum over the ranks; gathers the gradient.

    Args:
        values: This rank's summand; shapes are equal on all ranks, whose number divides the dimension ``dim``.
        channel: The ranks.
        dim: The dimension that is cut.
        label: What is transferred.
    """
    return _ReduceScatterFunction.apply(values, channel, dim, label)


# -- tensors without gradients ---------------------------------------------------------------------------------------


def _summed(values: torch.Tensor, channel: Channel, label: str) -> torch.Tensor:
    # In a copy: the sum may be made in its memory.
    return channel.sum(values.detach().clone(memory_format=torch.contiguous_format), label)


def _whole(values: torch.Tensor, channel: Channel, dim: int | UnequalParts, label: str) -> torch.Tensor:
    return gather_along(values, channel, dim, label) if isinstance(dim, int) else dim.gather(values, channel, label)


def _part(values: torch.Tensor, channel: Channel, dim: int | UnequalParts) -> torch.Tensor:
    if isinstance(dim, int):
        return values.chunk(channel.size, dim)[channel.rank].contiguous()
    return dim.part(values, channel.rank)


def gather_along(values: torch.Tensor, channel: Channel, dim: int, label: str) -> torch.Tensor:
    """Returns every rank's ``values``, one after the other along ``dim``; shapes are equal on all ranks."""
    return torch.cat(channel.gather(values, [values.shape[-1]] * channel.size, label), dim=dim)


def scatter_along(values: torch.Tensor, channel: Channel, dim: int, label: str) -> torch.Tensor:
    """Returns this rank's part along ``dim`` of the sum of ``values``, whose shapes are equal on all ranks."""
    if dim == 0:
        return channel.scatter_sum(values.contiguous(), label)
    rows = torch.stack(values.chunk(channel.size, dim))
    return channel.scatter_sum(rows, label).squeeze(0)
