"""Embeddings and convolutions whose weights are kept in few bits and do not train."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as fn

from deepspeed.ops.packed_linear import PackedFormat


class QuantizedEmbedding(nn.Module):
    """An embedding of which only the rows looked up are unpacked. A tied head shares its codes.

    Args:
        codes: As ``how`` makes them of ``[num_embeddings, embedding_dim]``.
        scales: As ``how`` makes them.
        how: A format whose rows can be read one by one.
        sizes: Number of embeddings and their dimension.
        dtype: Of the result.
    """

    def __init__(
        self, codes: nn.Parameter, scales: nn.Parameter, how: PackedFormat, sizes: tuple[int, int], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = sizes
        self.codes, self.scales = codes, scales
        self.format, self.dtype = how, dtype

    @property
    def weight(self) -> torch.Tensor:
        """The weight unpacked, a new tensor at every reading."""
        return self.format.unpack(self.codes, self.scales, self.num_embeddings, self.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Ids of any shape to ``[..., embedding_dim]``."""
        rows = self.format.rows(self.codes, self.scales, input.reshape(-1), self.dtype)
        return rows.view(*input.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """The sizes, for ``print(model)``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.format.bits}"


class QuantizedConv2d(nn.Module):
    """A convolution that unpacks its weight at every forward.

    Args:
        like: The convolution whose settings and bias it takes over.
        codes: As ``how`` makes them of the weight as ``[out, in * height * width]``.
        scales: As ``how`` makes them.
        how: The format.
    """

    def __init__(self, like: nn.Conv2d, codes: nn.Parameter, scales: nn.Parameter, how: PackedFormat) -> None:
        super().__init__()
        self.codes, self.scales, self.bias = codes, scales, like.bias
        self.format, self.dtype, self.shape = how, like.weight.dtype, tuple(like.weight.shape)
        self.stride, self.padding, self.dilation, self.groups = like.stride, like.padding, like.dilation, like.groups
        self.padding_mode, self._around = like.padding_mode, like._reversed_padding_repeated_twice

    @property
    def weight(self) -> torch.Tensor:
        """The weight unpacked, a new tensor at every reading."""
        return self.format.unpack(self.codes, self.scales, self.shape[0], self.dtype).view(self.shape)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[N, in, H, W]`` to ``[N, out, H', W']``."""
        padding = self.padding
        if self.padding_mode != "zeros":
            input, padding = fn.pad(input, self._around, mode=self.padding_mode), (0, 0)
        return fn.conv2d(input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        """The sizes, for ``print(model)``."""
        return f"{self.shape[1]}, {self.shape[0]}, kernel_size={self.shape[2:]}, bits={self.format.bits}"
