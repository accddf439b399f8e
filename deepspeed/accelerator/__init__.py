"""The device that training runs on, as one object: a thin layer over torch.

``get_accelerator()`` returns the kind of device that this process uses, with its streams, memory figures and
random state. Reading order: :mod:`.base` (the interface), :mod:`.cpu`, :mod:`.torch_device` (everything torch has a
device module for), :mod:`.selection` (which one is used).
"""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

# Lazy, because commands that do not need torch read the table of devices.

if TYPE_CHECKING:
    from deepspeed.accelerator import abstract_accelerator as abstract_accelerator
    from deepspeed.accelerator import base as base
    from deepspeed.accelerator import cpu as cpu
    from deepspeed.accelerator import devices as devices
    from deepspeed.accelerator import host_memory as host_memory
    from deepspeed.accelerator import real_accelerator as real_accelerator
    from deepspeed.accelerator import selection as selection
    from deepspeed.accelerator import torch_device as torch_device
    from deepspeed.accelerator.base import DeepSpeedAccelerator as DeepSpeedAccelerator
    from deepspeed.accelerator.cpu import cpu_has_bf16 as cpu_has_bf16
    from deepspeed.accelerator.cpu import cpu_has_fp16 as cpu_has_fp16
    from deepspeed.accelerator.selection import get_accelerator as get_accelerator
    from deepspeed.accelerator.selection import is_current_accelerator_supported as is_current_accelerator_supported
    from deepspeed.accelerator.selection import set_accelerator as set_accelerator

lazy_names(__name__)
