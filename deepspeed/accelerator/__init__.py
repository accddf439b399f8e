"""The device that training runs on, as one object: a thin layer over torch.

``get_accelerator()`` returns the kind of device that this process uses, with its streams, memory figures and
random state. Reading order: :mod:`.base` (the interface), :mod:`.cpu`, :mod:`.torch_device` (everything torch has a
device module for), :mod:`.selection` (which one is used).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.accelerator.base import DeepSpeedAccelerator as DeepSpeedAccelerator
    from deepspeed.accelerator.cpu import cpu_has_bf16 as cpu_has_bf16
    from deepspeed.accelerator.cpu import cpu_has_fp16 as cpu_has_fp16
    from deepspeed.accelerator.selection import get_accelerator as get_accelerator
    from deepspeed.accelerator.selection import is_current_accelerator_supported as is_current_accelerator_supported
    from deepspeed.accelerator.selection import set_accelerator as set_accelerator

# Lazy, because commands that do not need torch read the table of devices.
__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.accelerator.base": "DeepSpeedAccelerator",
        "deepspeed.accelerator.cpu": "cpu_has_bf16 cpu_has_fp16",
        "deepspeed.accelerator.selection": "get_accelerator is_current_accelerator_supported set_accelerator",
    },
    submodules="base cpu devices host_memory selection torch_device",
)
