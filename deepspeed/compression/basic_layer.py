"""Layers that compute with a compressed weight.

A layer keeps its parameters and its name and only changes its class to one of these, so tied weights, sharding and
checkpoints work as before. The attribute ``compression`` holds the techniques that are active now. Masks are buffers of
the layer; learned scores are parameters of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as fn

from deepspeed.compression.rounding import round_groups, straight_through
from deepspeed.compression.techniques import Techniques
from deepspeed.torch_private import is_inside_backward

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
    """A linear layer with a compressed weight, and a quantized input if configured."""

    _ds_features = _FEATURES
    compression: Techniques

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps ``[..., in]`` to ``[..., out]``."""
        weight, bias = self.compression.effective(self)
        return fn.linear(_input_of(self, input), weight, bias)


class Conv1DLayer_Compress(nn.Module):  # noqa: N801
    """A ``Conv1D`` of Transformers with a compressed weight: a linear layer whose weight is ``[in, out]``."""

    _ds_features = _FEATURES
    compression: Techniques

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[..., in]`` to ``[..., out]``."""
        weight, bias = self.compression.effective(self)
        return fn.linear(_input_of(self, x), weight, bias)


class Conv2dLayer_Compress(nn.Conv2d):  # noqa: N801
    """A convolution with a compressed weight, and a quantized input if configured."""

    _ds_features = _FEATURES
    compression: Techniques

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps ``[N, in, H, W]`` to ``[N, out, H', W']``."""
        weight, bias = self.compression.effective(self)
        return self._conv_forward(_input_of(self, input), weight, bias)


class BNLayer_Compress(nn.BatchNorm2d):  # noqa: N801
    """A batch norm after a convolution whose channels are pruned: its output is zero in those channels."""

    followed: Any  # a list with the convolution, so that it is not registered as a submodule

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps ``[N, C, H, W]`` to the same shape."""
        normal = super().forward(input)
        layer = self.followed[0]
        if "channel" not in layer.compression.acting:
            return normal
        return normal * layer.compression.mask(layer, "channel").to(normal.dtype)[:, None, None]


class Embedding_Compress(nn.Embedding):  # noqa: N801
    """An embedding with a compressed weight. Every row is a group, so only the rows that are looked up are rounded."""

    _ds_features = _FEATURES
    compression: Techniques

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps ids of any shape to ``[..., embedding_dim]``."""
        techniques = self.compression
        rounding = techniques.rounding
        by_rows = self.max_norm is None and (rounding is None or not rounding.stochastic)
        if by_rows and not techniques.acting:
            rows = super().forward(input)
            return techniques.rounded(rows.reshape(-1, rows.shape[-1])).view_as(rows) if rows.numel() else rows
        weight, _ = techniques.effective(self)
        return fn.embedding(
            input, weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )


MOMENTUM = 0.95


class QuantAct(nn.Module):
    """Rounds activations to few bits, with the gradient passed straight through.

    Dynamic: every token (the last dimension), or every image, has a scale of its own. Static: one scale from a running
    range, which is part of the state dict. In training it is an exponential moving average (momentum 0.95) of the
    ranges of the batches. Each rank has the range of its own batches; checkpoints hold rank 0's.

    Args:
        symmetric: Quantize symmetrically around zero; otherwise from the least to the largest value.
        static: Use the running range; otherwise that of each token or image.
        by_image: A group is one image (all dimensions but the first) instead of one token.
    """

    keeps_buffer_dtype = True  # in 16 bits a running range would stop moving

    x_min_max: torch.Tensor  # ``[2]``, fp32, the running range; zeros until the first batch. Exists only if ``static``.

    def __init__(self, bits: int, *, symmetric: bool = True, static: bool = False, by_image: bool = False) -> None:
        super().__init__()
        self.bits, self.symmetric, self.static, self.by_image = bits, symmetric, static, by_image
        self.is_acting = False  # whether values are quantized; otherwise they pass unchanged
        if static:
            self.register_buffer("x_min_max", torch.zeros(2, dtype=torch.float32))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the quantized values in the shape (at least 2-D) and dtype of ``values``."""
        if not self.is_acting or values.numel() == 0:
            return values
        if self.static:
            rounded = self._static(values)
        else:
            groups = values.detach().flatten(1) if self.by_image else values.detach().reshape(-1, values.shape[-1])
            rounded = round_groups(groups, self.bits, symmetric=self.symmetric).values().view(values.shape)
        return straight_through(values, rounded.to(values.dtype))

    @torch.no_grad()
    def _static(self, values: torch.Tensor) -> torch.Tensor:
        now = torch.stack((values.amin(), values.amax())).to(self.x_min_max)
        # A forward inside a backward recomputes activations; the range of this batch was counted already.
        if self.training and not is_inside_backward():
            first = not bool(self.x_min_max.any())
            self.x_min_max.copy_(now if first else MOMENTUM * self.x_min_max + (1 - MOMENTUM) * now)
        # A layer that was never trained has no range yet.
        low, high = (self.x_min_max if bool(self.x_min_max.any()) else now).float()
        return _within(values.float(), low, high, self.bits, self.symmetric)

    def extra_repr(self) -> str:
        """Returns bits and kind of rounding, for ``print(model)``."""
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"bits={self.bits}, {kind}, {'static' if self.static else 'dynamic'}"


def _within(values: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bits: int, symmetric: bool) -> torch.Tensor:
    """Quantizes values with a given range; values outside of it are clamped."""
    levels = 2**bits
    if symmetric:
        scale = 2 * torch.maximum(low.abs(), high.abs()) / levels
        offset, least, most = torch.zeros_like(scale), -levels // 2, levels // 2 - 1
    else:
        scale = (high - low) / levels
        least, most = 0, levels - 1
    scale = torch.where(scale == 0, 1.0, scale)
    if not symmetric:
        offset = (low / scale).round() * scale
    return ((values - offset) / scale).round().clamp(least, most) * scale + offset
