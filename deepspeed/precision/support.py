"""Whether the accelerator has the number formats that were asked for."""

from __future__ import annotations

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import warn_once
from deepspeed.precision.policy import PrecisionPolicy


def check_device(precision: PrecisionPolicy) -> None:
    """Raises for dtypes that the accelerator does not have; warns of those that it emulates.

    Raises:
        DeepSpeedConfigError: It does not have the dtype.
    """
    accelerator = get_accelerator()
    for dtype, key, supported in (
        (torch.float16, "fp16.enabled", accelerator.is_fp16_supported),
        (torch.bfloat16, "bf16.enabled", accelerator.is_bf16_supported),
    ):
        if precision.compute_dtype is dtype and not supported():
            raise DeepSpeedConfigError(
                f"{key}: the device {accelerator.device_name()} does not support {dtype}; set {key} to false"
            )
    _warn_of_emulation(precision)


def _warn_of_emulation(precision: PrecisionPolicy) -> None:
    """Warns once where the accelerator computes the configured dtype without instructions for it."""
    accelerator = get_accelerator()
    dtype = precision.autocast_dtype or precision.compute_dtype
    if dtype is None or not accelerator.emulates(dtype):
        return
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    key = f"{name}.enabled" if precision.autocast_dtype is None else f"torch_autocast.dtype {name}"
    other = torch.bfloat16 if dtype is torch.float16 else torch.float16
    usable = "fp32" if accelerator.emulates(other) else f"{'bf16' if other is torch.bfloat16 else 'fp16'} or fp32"
    warn_once(
        f"emulated {name}",
        f"{key}: expected a device with {name} instructions, found {accelerator.device_name()}, which emulates "
        f"{name}: the result is right, but a step takes many times as long as in fp32. Use {usable} here",
    )
