"""Linear layers whose weight is cut over the ranks.

*Column-parallel*: each rank has some of the output features. The input is the same on all ranks, so its gradient is
summed. *Row-parallel*: each rank has some of the input features, and the output is the sum; the bias is added once,
after it.

A layer is made in place from one that exists (``parallel.tensor.making``): it keeps its identity, its name,
its parameters and its hooks, and is still an instance of ``nn.Linear``.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.differentiable import copy_to
from deepspeed.parallel.tensor import regions
from deepspeed.parallel.tensor.shared_inputs import SharedInputs
from deepspeed.parallel.tensor.split import Split
from deepspeed.uncompiled import uncompiled

_AS_IT_IS = nullcontext()


class Sequence(Protocol):
    """What a layer asks of a sequence that tensor-parallel ranks share; ``sequence.CutSequence`` is one."""

    is_cut: bool

    def leave(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, then returns this rank's positions: ``[batch, S / ranks, width]``."""


@dataclass
class CutLinear:
    """How a linear layer is cut.

    Attributes:
        channel: The ranks.
        shared_inputs: Where inputs of column-parallel layers enter.
        split: Of the output features (column) or the input features (row).
        name: Of the layer, for messages.
        is_transposed: The weight is (in, out), as in Transformers' ``Conv1D``.
        is_gathered: A column-parallel layer gives all output features; a row-parallel one takes all input features.
        replicas: The ranks that have the same part, whose gradients are summed; None: this rank alone has it.
        sequence: Where activations outside the region of the layer are cut along the sequence: gathers and sums them.
    """

    channel: Channel
    shared_inputs: SharedInputs
    split: Split
    name: str
    is_transposed: bool = False
    is_gathered: bool = False
    replicas: Channel | None = None
    sequence: Sequence | None = None


class _Column(torch.autograd.Function):
    """A linear layer whose input's gradient is summed while the weight's is computed."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shared: regions.SharedInput | None,
        is_transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(values, weight)
        ctx.shared, ctx.is_transposed = shared, is_transposed
        if shared is not None:
            shared.users += 1
        return F.linear(values, weight.t() if is_transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = of_bias = pending = None
        if ctx.needs_input_grad[0]:
            rows = weight.t() if ctx.is_transposed else weight
            if ctx.shared is None:
                of_input = flat @ rows
            else:
                pending = ctx.shared.add(flat, rows)
        if ctx.needs_input_grad[1]:
            inputs = values.reshape(-1, values.shape[-1])
            of_weight = inputs.t() @ flat if ctx.is_transposed else flat.t() @ inputs
        if ctx.needs_input_grad[2]:
            of_bias = flat.sum(0)
        if pending is not None:
            of_input = pending.wait()
        return (None if of_input is None else of_input.view(values.shape)), of_weight, of_bias, None, None


class _Row(torch.autograd.Function):
    """A linear layer whose output is summed."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cut: CutLinear,
    ) -> torch.Tensor:
        ctx.save_for_backward(values, weight)
        ctx.is_transposed = cut.is_transposed
        rows = weight if cut.is_transposed else weight.t()
        flat = values.reshape(-1, values.shape[-1])
        product = cut.channel.place((*values.shape[:-1], rows.shape[1]), flat)
        out = product.view(flat.shape[0], rows.shape[1])
        if bias is not None and cut.channel.rank == 0:  # one of the summands has it
            torch.addmm(bias, flat, rows, out=out)
        else:
            torch.mm(flat, rows, out=out)
        return cut.channel.start_sum(product, f"the output of {cut.name}").wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = (flat @ (weight.t() if ctx.is_transposed else weight)).view(values.shape)
        if ctx.needs_input_grad[1]:
            inputs = values.reshape(-1, values.shape[-1])
            of_weight = inputs.t() @ flat if ctx.is_transposed else flat.t() @ inputs
        if ctx.needs_input_grad[2]:
            of_bias = flat.sum(0)
        return of_input, of_weight, of_bias, None


def _autocast_dtype(kind: str) -> torch.dtype | None:
    """Returns what ``torch.autocast`` would let a linear layer compute in; None: it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _as(dtype: torch.dtype, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


@uncompiled
def column(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cut: CutLinear) -> torch.Tensor:
    """Computes a column-parallel layer. All ranks of ``cut.channel`` must call it.

    Args:
        values: ``[..., in]``.
        weight: ``[out of this rank, in]``, or its transpose where ``cut.is_transposed``.
        bias: ``[out of this rank]`` or None.
        cut: How the layer is cut.

    Returns:
        ``[..., out of this rank]``, or ``[..., out]`` where ``cut.is_gathered``.
    """
    kind = values.device.type
    if cut.replicas is not None:
        weight = copy_to(weight, cut.replicas, f"the gradient of the weight of {cut.name}")
        if bias is not None:
            bias = copy_to(bias, cut.replicas, f"the gradient of the bias of {cut.name}")
    dtype = _autocast_dtype(kind)
    if dtype is not None:
        weight, bias = _as(dtype, weight, bias)  # type: ignore[assignment]
    if cut.sequence is not None and cut.sequence.is_cut:  # the gather before the region sums the gradient
        entered, shared = values if dtype is None else values.to(dtype), None
    else:
        entered, shared = cut.shared_inputs.enter(values, dtype, cut.name)
    with torch.autocast(kind, enabled=False) if dtype is not None else _AS_IT_IS:
        out = _Column.apply(entered, weight, bias, shared, cut.is_transposed)
    return regions.gather(out, cut.channel, cut.split, f"the output of {cut.name}") if cut.is_gathered else out


@uncompiled
def _row(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cut: CutLinear) -> torch.Tensor:
    kind = values.device.type
    if cut.is_gathered:
        values = regions.slice_of(values, cut.channel, cut.split, f"the gradient of the input of {cut.name}")
    if cut.sequence is not None and cut.sequence.is_cut:
        product = cut.sequence.leave(F.linear(values, weight.t() if cut.is_transposed else weight))
        if bias is None:
            return product
        return product + copy_to(bias, cut.channel, f"the gradient of the bias of {cut.name}")
    dtype = _autocast_dtype(kind)
    if dtype is None:
        return _Row.apply(values, weight, bias, cut)
    values, weight, bias = _as(dtype, values, weight, bias)  # type: ignore[assignment]
    with torch.autocast(kind, enabled=False):
        return _Row.apply(values, weight, bias, cut)


class ColumnLinear(nn.Linear):
    """A linear layer with some of the output features.

    Attributes:
        tensor_cut: How it is cut.
    """

    tensor_cut: CutLinear

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Maps ``[..., in]`` to ``[..., out of this rank]``, or to ``[..., out]`` where the output is gathered."""
        return column(values, self.weight, self.bias, self.tensor_cut)

    def extra_repr(self) -> str:
        """Returns the layer as a whole, and this rank's part."""
        return _shown(self, "column")


class RowLinear(nn.Linear):
    """A linear layer with some of the input features.

    Attributes:
        tensor_cut: How it is cut.
    """

    tensor_cut: CutLinear

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Maps ``[..., in of this rank]``, or ``[..., in]`` where the input is whole, to ``[..., out]``."""
        return _row(values, self.weight, self.bias, self.tensor_cut)

    def extra_repr(self) -> str:
        """Returns the layer as a whole, and this rank's part."""
        return _shown(self, "row")


def _shown(layer: nn.Linear, kind: str) -> str:
    cut: CutLinear = layer.tensor_cut  # type: ignore[assignment]
    features = f"in_features={layer.in_features}, out_features={layer.out_features}"
    return f"{features}, {kind}-parallel, rank {cut.channel.rank} of {cut.channel.size}"


class ColumnConv1D(ColumnLinear):
    """:class:`ColumnLinear` with a weight of (in, out)."""


class RowConv1D(RowLinear):
    """:class:`RowLinear` with a weight of (in, out)."""
