"""Selects the accelerator of this process: by environment variable, else the device that torch finds, else the CPU."""

from __future__ import annotations

import difflib
import os

import torch

from deepspeed.accelerator.base import DeepSpeedAccelerator
from deepspeed.accelerator.cpu import CPUAccelerator
from deepspeed.accelerator.torch_device import CUDAAccelerator, MPSAccelerator, TorchDeviceAccelerator
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist_once

SUPPORTED = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")

# This vendor's torch build uses the CUDA names.
_USES_CUDA_NAMES = ("cuda", "klxpu")

_current: DeepSpeedAccelerator | None = None


def get_accelerator() -> DeepSpeedAccelerator:
    """Returns the accelerator of this process. The first call selects it; later calls return the same object.

    ``DS_ACCELERATOR`` names it; otherwise it is the first kind of device that torch sees, otherwise the CPU. No device
    context is started.

    Raises:
        DeepSpeedConfigError: ``DS_ACCELERATOR`` is unknown, or names a device that torch does not see here.
    """
    if _current is None:
        chosen = os.environ.get("DS_ACCELERATOR", "").strip().lower()
        set_accelerator(_from_environment(chosen) if chosen else _detect())
    assert _current is not None
    return _current


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Sets what :func:`get_accelerator` returns. Raises TypeError: it is no :class:`DeepSpeedAccelerator`."""
    global _current
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        raise TypeError(f"set_accelerator: expected a DeepSpeedAccelerator, found {type(accel_obj).__name__}; pass one")
    _current = accel_obj


def is_current_accelerator_supported() -> bool:
    """Returns whether the accelerator in use is of a supported kind."""
    return get_accelerator()._name in SUPPORTED


def _from_environment(name: str) -> DeepSpeedAccelerator:
    if name not in SUPPORTED:
        close = difflib.get_close_matches(name, SUPPORTED, n=1)
        hint = f"use {close[0]!r}, or " if close else ""
        raise DeepSpeedConfigError(
            f"DS_ACCELERATOR={name}: expected one of {', '.join(SUPPORTED)}; {hint}unset it to detect the device"
        )
    if name == "cpu":
        return CPUAccelerator()
    accelerator = _create(name)
    try:
        available = accelerator.is_available()
    except RuntimeError as error:  # torch.get_device_module: no such device in this build
        raise DeepSpeedConfigError(_not_seen(name)) from error
    if not available:
        raise DeepSpeedConfigError(_not_seen(name))
    return accelerator


def _not_seen(name: str) -> str:
    return (
        f"DS_ACCELERATOR={name}: torch {torch.__version__} sees no {name} device here; install a torch build "
        "(and driver) for it, or unset DS_ACCELERATOR to detect the device"
    )


def _create(name: str) -> DeepSpeedAccelerator:
    if name in _USES_CUDA_NAMES:
        return CUDAAccelerator()
    return MPSAccelerator() if name == "mps" else TorchDeviceAccelerator(name)


def _detect() -> DeepSpeedAccelerator:
    # device_count() starts no CUDA context; torch.accelerator's check would initialize the driver.
    if torch.cuda.device_count() > 0:
        return CUDAAccelerator()
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        return _create(found.type)
    log_dist_once("no accelerator device found, using the CPU (set DS_ACCELERATOR=cpu to silence this line)")
    return CPUAccelerator()
