"""Settings of low-rank adapters and of quantized weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist_once


@dataclass
class LoRAConfig:
    """Settings of low-rank adapters beside a frozen base.

    Raises:
        DeepSpeedConfigError: A number is outside its range.
    """

    lora_r: int = 64  # rank of the adapters
    lora_alpha: float = 16.0  # the output of the adapters is multiplied by ``lora_alpha / lora_r``
    # Number of ranks that share the base weight, at every ZeRO stage: all data-parallel ranks. 1: only stage 3 shards
    # it. ``deepspeed.initialize`` cuts the weight; until then every rank has all of it, so that it can be loaded and
    # used. A model built inside ``deepspeed.zero.Init`` is cut from the start.
    base_weight_sharding: int = 1
    # Base weights live in host memory at every ZeRO stage, and are copied to the device where they are used. Offloaded
    # weights are sharded over all data-parallel ranks, regardless of ``base_weight_sharding``.
    offload: bool = False
    # Share of the bytes of base weights that is offloaded, 0 to 1, from the first layers on. 0: all with ``offload``,
    # otherwise none.
    offload_ratio: float = 0.0
    # adapters are made by :meth:`LoRAOptimizedLinear.init_lora` instead of with the layer
    delay_lora_init: bool = False
    # layers whose names contain one of these get adapters
    target_mods: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )

    def __post_init__(self) -> None:
        if self.lora_r < 1:
            raise DeepSpeedConfigError(
                f"LoRAConfig(lora_r={self.lora_r}): expected a rank of 1 or more; without adapters, give no LoRAConfig"
            )
        if self.base_weight_sharding < 1:
            raise DeepSpeedConfigError(
                f"LoRAConfig(base_weight_sharding={self.base_weight_sharding}): expected the number of ranks, or 1"
            )
        if not 0 <= self.offload_ratio <= 1:
            raise DeepSpeedConfigError(
                f"LoRAConfig(offload_ratio={self.offload_ratio}): expected a share of the base weights, 0 to 1; use 0 "
                "to keep them on the device"
            )

    @property
    def offloaded_share(self) -> float:
        """The share of the bytes of base weights that is offloaded, 0 to 1."""
        return self.offload_ratio or float(self.offload)


@dataclass
class QuantizationConfig:
    """Holds the settings by which a weight is quantized.

    Raises:
        DeepSpeedConfigError: ``q_bits`` is not 4 or 8. ``group_size`` is checked when a weight is quantized.
    """

    q_bits: int = 8  # 8 (one scale per output feature) or 4 (a scale and an offset per group)
    mantissa_bits: int = 3  # has no effect: codes are integers here, which torch's kernels multiply
    group_size: int = 64  # Input features of a group at 4 bits: 32, 64, 128 or 256. No effect at 8 bits.
    q_dtype: torch.dtype | None = None  # has no effect: ``q_bits`` decides the dtype of the codes

    def __post_init__(self) -> None:
        if self.q_bits not in (4, 8):
            raise DeepSpeedConfigError(
                f"QuantizationConfig(q_bits={self.q_bits}): expected 8 or 4, as torch has no kernels for other widths; "
                "use one of these"
            )
        if self.mantissa_bits != 3:
            log_dist_once(
                f"QuantizationConfig(mantissa_bits={self.mantissa_bits}): has no effect, as codes are integers"
            )
