"""A linear layer made of smaller ones, so that ZeRO stage 3 gathers a part of its weight at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.access.gathered import GatheredParameters


class TiledLinear(nn.Module):
    """A linear layer whose weight is cut into a grid of ``out_splits`` x ``in_splits`` layers.

    Sizes need not divide: parts differ by one feature at most, larger ones first. The bias belongs to the last layer of
    each row of the grid.

    Args:
        input_is_already_split: Forward gets the list of the parts of the input.
        combine_out_splits: Forward returns one tensor; False: the list of its parts.
        linear_cls: Class of the layers, called with the features of its parts, ``bias=`` and ``**kwargs``.
        init_linear: A linear layer whose values are copied; see :meth:`copy_params_from`.
        **kwargs: For ``linear_cls``.

    Raises:
        DeepSpeedConfigError: There are more parts than features, or ``init_linear`` has other sizes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = _bounds("in", in_features, in_splits)  # bounds of the parts of the input
        self.out_parts = _bounds("out", out_features, out_splits)  # bounds of the parts of the output
        # the layers: ``linears[o][i]`` makes part o of the output of part i of the input
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(
                    self.in_parts[i + 1] - self.in_parts[i],
                    self.out_parts[o + 1] - self.out_parts[o],
                    bias=bias and i == in_splits - 1,
                    **kwargs,
                )
                for i in range(in_splits)
            )
            for o in range(out_splits)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Maps ``[..., in_features]`` to ``[..., out_features]``; either may be a list of its parts."""
        outputs = [self._sum(row, self._parts(input_)) for row in self.linears]
        return self._combine(outputs)

    def copy_params_from(self, other: nn.Linear) -> None:
        """Copies weight and bias of a whole layer. Where parameters are sharded every rank must call it.

        Raises:
            DeepSpeedConfigError: ``other`` has other sizes, or only one of both has a bias.
        """
        own = [*self.parameters()]
        with torch.no_grad(), GatheredParameters([*other.parameters()]), GatheredParameters(own, modifier_rank=0):
            expected = (self.out_features, self.in_features)
            if tuple(other.weight.shape) != expected or (other.bias is not None) != self.use_bias:
                raise DeepSpeedConfigError(
                    f"TiledLinear.copy_params_from: expected a weight of shape {expected} "
                    f"{'with' if self.use_bias else 'without'} a bias, found {tuple(other.weight.shape)} "
                    f"{'without' if other.bias is None else 'with'} one; give a layer of the same sizes"
                )
            grid: Any = self.linears
            for o, row in enumerate(grid):
                rows = slice(self.out_parts[o], self.out_parts[o + 1])
                for i, layer in enumerate(row):
                    layer.weight.copy_(other.weight[rows, self.in_parts[i] : self.in_parts[i + 1]])
                if other.bias is not None:
                    row[-1].bias.copy_(other.bias[rows])

    def _parts(self, input_: Any) -> list[torch.Tensor]:
        if not self.input_is_already_split:
            sizes = [high - low for low, high in zip(self.in_parts, self.in_parts[1:], strict=False)]
            return list(input_.split(sizes, dim=-1))
        if len(input_) != self.in_splits:
            raise DeepSpeedConfigError(
                f"TiledLinear(input_is_already_split=True): expected the {self.in_splits} parts of the input, found "
                f"{len(input_)}; cut it as in_parts does"
            )
        return list(input_)

    def _sum(self, row: Any, parts: list[torch.Tensor]) -> Any:
        total: Any = None
        for layer, part in zip(row, parts, strict=True):
            made = layer(part)
            total = made if total is None else total + made
        return total

    def _combine(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs


class TiledLinearReturnBias(TiledLinear):
    """Tiles layers that return ``(output, bias)`` and leave their sum to the program, as Megatron-LM's do.

    Forward returns ``(output, bias)``; the bias is None if no layer returned one.
    """

    def _sum(self, row: Any, parts: list[torch.Tensor]) -> Any:
        total, found = None, None
        for layer, part in zip(row, parts, strict=True):
            made, bias = layer(part)
            total = made if total is None else total + made
            found = bias if bias is not None else found
        return total, found

    def _combine(self, outputs: list[Any]) -> Any:
        values, biases = [value for value, _ in outputs], [bias for _, bias in outputs]
        if not self.combine_out_splits:
            return values, biases
        has_bias = all(bias is not None for bias in biases)
        return torch.cat(values, dim=-1), torch.cat(biases, dim=-1) if has_bias else None


def _bounds(side: str, features: int, parts: int) -> list[int]:
    if not 1 <= parts <= features:
        raise DeepSpeedConfigError(
            f"TiledLinear({side}_splits={parts}): expected 1 to {features} parts, as there are {features} features"
        )
    smaller, larger = divmod(features, parts)
    return [place * smaller + min(place, larger) for place in range(parts + 1)]
