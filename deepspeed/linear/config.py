"""Configurations of the layers of this package."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist_once


@dataclass
class LoRAConfig:
    """Low-rank adapters beside a frozen base.

    Attributes:
        lora_r: Rank of the adapters.
        lora_alpha: The adapters' part is multiplied by ``lora_alpha / lora_r``.
        base_weight_sharding: Ranks that share the base weight, at every ZeRO stage: all data-parallel ranks. 1: each
            has it whole, but for stage 3. The weight is cut in ``deepspeed.initialize``; until then every rank has all
            of it, so that it can be loaded and used. A model built inside ``deepspeed.zero.Init`` is cut from the
            start.
        offload: Base weights live in host memory at every ZeRO stage, and come to the device where they are used. All
            data-parallel ranks share what is there, regardless of ``base_weight_sharding``.
        offload_ratio: Share of the bytes of base weights that do so, 0 to 1: the first layers of the model. 0: all
            with ``offload``, otherwise none.
        delay_lora_init: Adapters are made by :meth:`LoRAOptimizedLinear.init_lora` instead of with the layer.
        target_mods: Parts of names of the layers that get adapters.

    Raises:
        DeepSpeedConfigError: A value cannot be used.
    """

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
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
                f"LoRAConfig(base_weight_sharding={self.base_weight_sharding}): expected a number of ranks, 1 or more"
            )
        if not 0 <= self.offload_ratio <= 1:
            raise DeepSpeedConfigError(
                f"LoRAConfig(offload_ratio={self.offload_ratio}): expected the share of base weights that live in host "
                "memory, 0 to 1"
            )

    @property
    def offloaded_share(self) -> float:
        """Share of the base weights that live in host memory, 0 to 1."""
        return self.offload_ratio or float(self.offload)


@dataclass
class QuantizationConfig:
    """Holds the settings by which a weight is quantized.

    Attributes:
        q_bits: 8 (one scale per output feature) or 4 (a scale and an offset per group).
        mantissa_bits: Without effect: codes are whole numbers here, which torch's kernels multiply.
        group_size: Input features of a group at 4 bits: 32, 64, 128 or 256. Without effect at 8 bits.
        q_dtype: Without effect: ``q_bits`` decides the dtype of the codes.

    Raises:
        DeepSpeedConfigError: There is no such format.
    """

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 64
    q_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.q_bits not in (4, 8):
            raise DeepSpeedConfigError(
                f"QuantizationConfig(q_bits={self.q_bits}): weights are kept in 8 or in 4 bits; 6 and 12 bits have no "
                "kernel in torch"
            )
        if self.mantissa_bits != 3:
            log_dist_once(
                f"QuantizationConfig(mantissa_bits={self.mantissa_bits}): without effect, codes are whole numbers"
            )
