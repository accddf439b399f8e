"""Linear layers, embeddings and convolutions with frozen weights of 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as fn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.linear.config import QuantizationConfig
from deepspeed.linear.sharded import gather_for_packing
from deepspeed.ops.packed_linear import PackedFormat, packed_format, packed_linear
from deepspeed.zero.address import full_shape


class QuantizedLinear(nn.Module):
    """Computes ``x @ weight.t() + bias`` with a quantized weight: the base of adapters, or a layer for inference.

    At 8 bits every output feature has a scale; at 4 bits every group of input features has a scale and an offset. The
    layer computes in the dtype of its input; bfloat16 is fastest. The constructor makes a weight of zeros.
    :meth:`pack` sets it, and so does loading the state dict of a plain layer.

    Args:
        quantization_config: Width and, at 4 bits, group size.
        dtype: The dtype of the bias, which is trainable, and of :attr:`weight`.

    Raises:
        DeepSpeedConfigError: ``input_dim`` is not a whole number of groups.
        ValueError: There is no format with the group size.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        quantization_config: QuantizationConfig | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        config = QuantizationConfig() if quantization_config is None else quantization_config
        self.in_features, self.out_features, self.dtype = input_dim, output_dim, dtype
        self.format = packed_format(config.q_bits, config.group_size)
        if refusal := self.format.refusal(input_dim):
            raise DeepSpeedConfigError(f"QuantizedLinear({input_dim}, {output_dim}): {refusal}; choose a smaller group")
        codes, scales = self.format.shapes(output_dim, input_dim)
        code_dtype = torch.int8 if self.format.bits == 8 else torch.uint8
        # the codes of the weight: a frozen parameter of int8 or uint8, so that ZeRO stage 3 can shard it
        self.codes = nn.Parameter(torch.zeros(codes, dtype=code_dtype), requires_grad=False)
        # their scales, a frozen parameter in bfloat16
        self.scales = nn.Parameter(torch.zeros(scales, dtype=torch.bfloat16), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(output_dim, dtype=dtype)) if bias else None

    @classmethod
    def of(cls, plain: nn.Module, config: QuantizationConfig) -> QuantizedLinear:
        """Returns a quantized layer with the values of a plain one, and with its bias.

        Args:
            plain: Has a ``weight`` of ``[out, in]``, which may be on meta, and a ``bias`` or None. If ``zero.Init`` has
                sharded them, every rank must call this, and the new parameters are sharded too.
        """
        weight: nn.Parameter = plain.weight  # type: ignore[assignment]
        out_features, in_features = full_shape(weight)
        with torch.device("meta"):  # packing makes the parameters
            layer = cls(in_features, out_features, False, config, weight.dtype)
        if not weight.is_meta:
            with gather_for_packing("a quantized layer", plain, layer):
                layer.pack(weight)
        layer.bias = plain.bias  # type: ignore[assignment]
        return layer

    @classmethod
    def with_codes(
        cls,
        codes: nn.Parameter,
        scales: nn.Parameter,
        how: PackedFormat,
        sizes: tuple[int, int],
        bias: nn.Parameter | None,
        dtype: torch.dtype,
    ) -> QuantizedLinear:
        """Returns a layer with existing codes and scales, which another layer may share; fp32 scales stay fp32.

        Args:
            codes: As ``how`` makes them.
            sizes: Output and input features.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.out_features, layer.in_features = sizes
        layer.dtype, layer.format = dtype, how
        layer.codes, layer.scales, layer.bias = codes, scales, bias
        return layer

    def pack(self, weight: torch.Tensor) -> float:
        """Packs a weight, ``[output_dim, input_dim]``, finite; returns the norm of the error by the norm of the weight.

        Raises:
            ValueError: It has another shape, or values that are not finite.
        """
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ValueError(
                f"QuantizedLinear.pack: expected a weight of shape {(self.out_features, self.in_features)}, "
                f"found {tuple(weight.shape)}. Build the layer with in_features and out_features of the weight"
            )
        if not bool(weight.isfinite().all()):
            raise ValueError(
                "QuantizedLinear.pack: the weight has values that are not finite; correct them before packing"
            )
        codes, scales = self.format.pack(weight)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        wrong = total = 0.0
        for part in self.format.columns(codes, scales, self.out_features, torch.float32):
            original = weight.detach()[part.start : part.stop].float()
            unpacked = part.weight if part.scale is None else part.weight * part.scale
            wrong += float((unpacked.t() - original).square().sum())
            total += float(original.square().sum())
        return (wrong / total) ** 0.5 if total else 0.0

    @property
    def weight(self) -> torch.Tensor:
        """The unpacked weight, ``[output_dim, input_dim]`` in :attr:`dtype`: a new tensor at every read."""
        return self.format.unpack(self.codes, self.scales, self.out_features, self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[..., input_dim]`` to ``[..., output_dim]`` in the dtype of ``x``."""
        return packed_linear(x, self.codes, self.scales, self.out_features, self.format, self.bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and f"{prefix}codes" not in state_dict:  # saved by a plain layer
            codes, scales = self.format.pack(weight)
            del state_dict[f"{prefix}weight"]
            state_dict |= {f"{prefix}codes": codes, f"{prefix}scales": scales}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Returns the sizes, for ``print(model)``."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, bits={self.format.bits}"


class QuantizedEmbedding(nn.Module):
    """An embedding that unpacks only the rows that are looked up. A tied head can share its codes.

    Args:
        codes: As ``how`` makes them of ``[num_embeddings, embedding_dim]``.
        how: A format whose rows can be read one by one.
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
        """The unpacked weight, in :attr:`dtype`: a new tensor at every read."""
        return self.format.unpack(self.codes, self.scales, self.num_embeddings, self.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps ids of any shape to ``[..., embedding_dim]``."""
        rows = self.format.rows(self.codes, self.scales, input.reshape(-1), self.dtype)
        return rows.view(*input.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Returns the sizes, for ``print(model)``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.format.bits}"


class QuantizedConv2d(nn.Module):
    """A convolution that unpacks its weight at every forward.

    Args:
        like: The convolution whose settings and bias it takes over.
        codes: As ``how`` makes them of the weight as ``[out, in * height * width]``.
    """

    def __init__(self, like: nn.Conv2d, codes: nn.Parameter, scales: nn.Parameter, how: PackedFormat) -> None:
        super().__init__()
        self.codes, self.scales, self.bias = codes, scales, like.bias
        self.format, self.dtype, self.shape = how, like.weight.dtype, tuple(like.weight.shape)
        self.stride, self.padding, self.dilation, self.groups = like.stride, like.padding, like.dilation, like.groups
        self.padding_mode, self._around = like.padding_mode, like._reversed_padding_repeated_twice

    @property
    def weight(self) -> torch.Tensor:
        """The unpacked weight, in :attr:`dtype`: a new tensor at every read."""
        return self.format.unpack(self.codes, self.scales, self.shape[0], self.dtype).view(self.shape)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps ``[N, in, H, W]`` to ``[N, out, H', W']``."""
        padding = self.padding
        if self.padding_mode != "zeros":
            input, padding = fn.pad(input, self._around, mode=self.padding_mode), (0, 0)
        return fn.conv2d(input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        """Returns the sizes, for ``print(model)``."""
        return f"{self.shape[1]}, {self.shape[0]}, kernel_size={self.shape[2:]}, bits={self.format.bits}"
