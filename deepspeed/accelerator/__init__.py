"""The device that training runs on: one object, a thin layer over torch.

``get_accelerator()`` returns the kind of device that this process uses, with its streams, memory figures and
random state. Reading order: :mod:`.base` (the contract), :mod:`.cpu`, :mod:`.torch_device` (everything torch has a
device module for), :mod:`.selection` (which one is used).
"""

from __future__ import annotations

from deepspeed.accelerator.base import DeepSpeedAccelerator
from deepspeed.accelerator.cpu import cpu_has_bf16, cpu_has_fp16
from deepspeed.accelerator.selection import (
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)

__all__ = [
    "DeepSpeedAccelerator",
    "cpu_has_bf16",
    "cpu_has_fp16",
    "get_accelerator",
    "is_current_accelerator_supported",
    "set_accelerator",
]
