"""Quantised parts of linear layers that tensor-parallel ranks share: each rank multiplies its part, as in training."""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.linear.quantized_linear import QuantizedLinear
from deepspeed.parallel.tensor import regions
from deepspeed.parallel.tensor.linear import ColumnLinear, CutLinear, RowLinear


class QuantizedColumn(nn.Module):
    """A column-parallel layer whose part is quantised. Without gradients: the input's would have to be summed."""

    def __init__(self, part: QuantizedLinear, cut: CutLinear) -> None:
        super().__init__()
        self.part, self.tensor_cut = part, cut

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out of this rank]``, or to all ``out`` where the output is gathered."""
        out = self.part(values)
        cut = self.tensor_cut
        return regions.gather(out, cut.channel, cut.split, f"the output of {cut.name}") if cut.is_gathered else out


class QuantizedRow(nn.Module):
    """A row-parallel layer whose part is quantised. Without gradients, as :class:`QuantizedColumn`."""

    def __init__(self, part: QuantizedLinear, cut: CutLinear) -> None:
        super().__init__()
        self.bias, part.bias = part.bias, None  # added once, after the sum
        self.part, self.tensor_cut = part, cut

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """``[..., in of this rank]``, or all ``in`` where the input is whole, to ``[..., out]``."""
        cut = self.tensor_cut
        if cut.is_gathered:
            values = regions.slice_of(values, cut.channel, cut.split, f"the input of {cut.name}")
        total = cut.channel.sum(self.part(values), f"the output of {cut.name}")
        return total if self.bias is None else total + self.bias


def weight_of_part(module: nn.Module) -> torch.Tensor | None:
    """This rank's part of the weight, ``[out_features, in_features]``; None for a layer that is not cut."""
    if not isinstance(module, (ColumnLinear, RowLinear)):
        return None
    return module.weight.t() if module.tensor_cut.is_transposed else module.weight


def around(module: nn.Module, part: QuantizedLinear) -> nn.Module:
    """What takes the place of ``module``: ``part``, or the layer around it where ``module`` was cut."""
    if isinstance(module, ColumnLinear):
        return QuantizedColumn(part, module.tensor_cut)
    if isinstance(module, RowLinear):
        return QuantizedRow(part, module.tensor_cut)
    return part
