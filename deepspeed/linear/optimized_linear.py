"""Linear layers for fine-tuning: a frozen base, quantized or not, and low-rank adapters that train.

Source: E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (arXiv:2106.09685), equation 3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from deepspeed.errors import CallOrderError
from deepspeed.linear.bases import offload, share
from deepspeed.linear.config import LoRAConfig, QuantizationConfig
from deepspeed.linear.quantized_linear import QuantizedLinear


class OptimizedLinear(nn.Module):
    """Constructs the linear layer that the configurations request; its class is another one.

    The class is ``linear_cls`` without configurations, :class:`QuantizedLinear` with only a quantization, and
    :class:`LoRAOptimizedLinear` with adapters.

    Args:
        lora_config: Settings of the adapters; None: there are none.
        quantization_config: How the base weight is quantized; None: it has ``dtype``.

    Raises:
        DeepSpeedConfigError: ``input_dim`` is not a whole number of groups.
        ValueError: There is no format with the group size of ``quantization_config``.
    """

    def __new__(  # type: ignore[misc]  # returns another class on purpose
        cls,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: type[nn.Module] = nn.Linear,
    ) -> nn.Module:
        """Returns the layer that the configurations request."""
        plain = linear_cls(input_dim, output_dim, bias=bias, device=device, dtype=dtype)
        return optimized(plain, lora_config, quantization_config)


def optimized(
    plain: nn.Module, lora_config: LoRAConfig | None, quantization_config: QuantizationConfig | None
) -> nn.Module:
    """Returns the replacement of a plain linear layer, which takes over its parameters.

    Args:
        plain: Has a ``weight`` of ``[out, in]``, and a ``bias`` or None.
    """
    if lora_config is not None:
        return LoRAOptimizedLinear(plain, lora_config, quantization_config)
    return plain if quantization_config is None else QuantizedLinear.of(plain, quantization_config)


class LoRAOptimizedLinear(nn.Module):
    """Computes ``y = W x + b + (alpha / r) B A x`` with ``W`` and ``b`` frozen.

    Args:
        lora_config: Rank and scaling of the adapters, how many ranks share the base, and where it lives.
        quantization_config: How the base is quantized; None: it is not.

    Attributes:
        weight: The base, ``[out, in]``, frozen. If quantized, every read unpacks it anew, in the dtype of the layer.
        lora_weight_1: A, ``[r, in]``, drawn from a uniform distribution; None before :meth:`init_lora`.
        lora_weight_2: B, ``[out, r]``, zeros at first, so that the layer starts equal to the plain one.
        lora_scaling_factor: ``alpha / r``.
    """

    _ds_features = ("deepspeed.linear.feature",)

    def __init__(
        self, plain: nn.Module, lora_config: LoRAConfig, quantization_config: QuantizationConfig | None = None
    ) -> None:
        super().__init__()
        self.lora_config = lora_config
        weight: Any = plain.weight
        self.input_dim, self.output_dim = int(plain.in_features), int(plain.out_features)  # type: ignore[arg-type]
        self.dtype = weight.dtype
        self.lora_scaling_factor = lora_config.lora_alpha / lora_config.lora_r
        self.base: QuantizedLinear | None = None
        self.bias: nn.Parameter | None = plain.bias  # type: ignore[assignment]
        if quantization_config is None:
            self.register_parameter("weight", weight)
        else:
            self.base = QuantizedLinear.of(plain, quantization_config)
            self.base.bias = None
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.ds_optim_param = True  # type: ignore[attr-defined]  # upstream's attribute
        weights = [p for p in self.parameters() if p is not self.bias]
        share(weights, lora_config.base_weight_sharding)
        offload(weights, lora_config.offloaded_share)
        self.lora_weight_1: nn.Linear | None = None
        self.lora_weight_2: nn.Linear | None = None
        if not lora_config.delay_lora_init:
            self.init_lora()

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            base = self._modules.get("base")
            if base is not None:
                return base.weight
        return super().__getattr__(name)

    def init_lora(self) -> None:
        """Makes the adapters that ``delay_lora_init`` left out. Call it before ``deepspeed.initialize``.

        Raises:
            CallOrderError: The adapters exist already.
        """
        if self.lora_weight_1 is not None:
            raise CallOrderError("LoRAOptimizedLinear.init_lora: the adapters exist already; call it once")
        rank = self.lora_config.lora_r
        # The layer may have been moved or cast since it was made.
        stored: torch.Tensor = self.weight if self.base is None else self.base.codes
        make: dict[str, Any] = {"bias": False, "device": stored.device, "dtype": self.dtype}
        if self.base is None:
            make["dtype"] = self.dtype = stored.dtype
        first, second = nn.Linear(self.input_dim, rank, **make), nn.Linear(rank, self.output_dim, **make)
        nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5))
        nn.init.zeros_(second.weight)
        self.lora_weight_1, self.lora_weight_2 = first, second

    def full_weight(self) -> torch.Tensor:
        """Returns the base weight, ``[output_dim, input_dim]``, without the adapters.

        If it is sharded, gather it first.
        """
        return self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[..., input_dim]`` to ``[..., output_dim]``.

        Raises:
            CallOrderError: There are no adapters yet.
        """
        if self.lora_weight_1 is None or self.lora_weight_2 is None:
            raise CallOrderError("LoRAOptimizedLinear: delay_lora_init left the adapters out; call init_lora() first")
        base = nn.functional.linear(x, self.weight) if self.base is None else self.base(x)
        if self.bias is not None:
            base = base + self.bias
        return base + self.lora_scaling_factor * self.lora_weight_2(self.lora_weight_1(x))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.base is not None and f"{prefix}weight" in state_dict:  # saved by the plain layer
            state_dict[f"{prefix}base.weight"] = state_dict.pop(f"{prefix}weight")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Returns the sizes, for ``print(model)``."""
        return f"{self.input_dim}, {self.output_dim}, rank={self.lora_config.lora_r}, bias={self.bias is not None}"
