"""Layers that compute with a compressed weight.

A layer of a model keeps its parameters, its name and its place and gets one of these classes (as layers that are cut
over tensor-parallel ranks do), so that ties, sharding and checkpoints see the model as it was. What acts now is in
``compression``, the masks in buffers of the layer, scores that are learned in parameters of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as fn

from deepspeed.compression.activations import QuantAct
from deepspeed.compression.techniques import Techniques

__all__ = [
    "BNLayer_Compress",
    "Conv1DLayer_Compress",
    "Conv2dLayer_Compress",
    "Embedding_Compress",
    "LinearLayer_Compress",
    "QuantAct",
]

INPUT = "activation_quantizer"
_FEATURES = ("deepspeed.compression.feature",)


def _input_of(layer: nn.Module, values: torch.Tensor) -> torch.Tensor:
    quantizer = getattr(layer, INPUT, None)
    return values if quantizer is None else quantizer(values)


class LinearLayer_Compress(nn.Linear):  # noqa: N801 - a published name
    """A linear layer with a compressed weight, and rounded input where that is asked for."""

    _ds_features = _FEATURES
    compression: Techniques

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        weight, bias = self.compression.effective(self)
        return fn.linear(_input_of(self, input), weight, bias)


class Conv1DLayer_Compress(nn.Module):  # noqa: N801
    """The same for transformers' ``Conv1D``, whose weight is ``[in, out]``."""

    _ds_features = _FEATURES
    compression: Techniques

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        weight, bias = self.compression.effective(self)
        return fn.linear(_input_of(self, x), weight, bias)


class Conv2dLayer_Compress(nn.Conv2d):  # noqa: N801
    """A convolution with a compressed weight, and rounded input where that is asked for."""

    _ds_features = _FEATURES
    compression: Techniques

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[N, in, H, W]`` to ``[N, out, H', W']``."""
        weight, bias = self.compression.effective(self)
        return self._conv_forward(_input_of(self, input), weight, bias)


class BNLayer_Compress(nn.BatchNorm2d):  # noqa: N801
    """A batch norm after a convolution whose channels are pruned: its output is zero in those channels."""

    followed: Any  # a list with the convolution, so that it is no child of this layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[N, C, H, W]`` to the same."""
        normal = super().forward(input)
        layer = self.followed[0]
        if "channel" not in layer.compression.acting:
            return normal
        return normal * layer.compression.mask(layer, "channel").to(normal.dtype)[:, None, None]


class Embedding_Compress(nn.Embedding):  # noqa: N801
    """An embedding with a compressed weight: every row is a group, so that only the rows looked up are rounded."""

    _ds_features = _FEATURES
    compression: Techniques

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Ids of any shape to ``[..., embedding_dim]``."""
        techniques = self.compression
        rounding = techniques.rounding
        by_rows = self.max_norm is None and (rounding is None or not rounding.stochastic)
        if by_rows and not techniques.acting:
            rows = super().forward(input)
            return techniques.rounded(rows.flatten(0, -2)).view_as(rows)
        weight, _ = techniques.effective(self)
        return fn.embedding(
            input, weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )
