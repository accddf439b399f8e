"""The CPU as an accelerator: one synchronous device, whose memory figures are those of the process.

:func:`keep_freed_memory` makes malloc cache freed memory, by two ``mallopt`` settings, as the allocators of other
devices do. Otherwise glibc returns large blocks to the system when they are freed, and their next use causes a page
fault per 4 KiB: 0.6 ms per MiB were measured, against 0.03 for memory that the process kept. A training step frees and
allocates gradients, gathered parameters and activations by the hundred MiB.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from deepspeed.accelerator import host_memory
from deepspeed.accelerator.base import Index, SingleDeviceAccelerator

_TYPED_CLASSES: dict[torch.dtype, Any] = {
    torch.float: torch.FloatTensor,
    torch.half: torch.HalfTensor,
    torch.bfloat16: torch.BFloat16Tensor,
    torch.double: torch.DoubleTensor,
    torch.int: torch.IntTensor,
    torch.long: torch.LongTensor,
    torch.uint8: torch.ByteTensor,
}


class CPUAccelerator(SingleDeviceAccelerator):
    """The processor and its memory. Device strings carry no index."""

    def __init__(self) -> None:
        super().__init__("cpu", "gloo")
        self._peak = host_memory.PeakResidentMemory()

    def device_name(self, index: Index = None) -> str:
        """Returns ``"cpu"``."""
        return "cpu"

    def set_device(self, index: int) -> None:
        """Does nothing: there is one device, regardless of the local rank."""

    def device_count(self) -> int:
        """Returns the number of ranks on this machine, from the launcher's ``LOCAL_SIZE``; 1 if it is not set."""
        local_size = os.environ.get("LOCAL_SIZE", "")
        return max(int(local_size), 1) if local_size.isdecimal() else 1

    def synchronize(self, index: Index = None) -> None:
        """Does nothing: an operation is finished when its call returns."""

    def is_available(self) -> bool:
        """Returns True."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Seeds torch's generator."""
        torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """Returns the seed that torch's generator started from."""
        return torch.initial_seed()

    def get_rng_state(self, index: Index = None) -> torch.Tensor:
        """Returns the state of torch's host generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, index: Index = None) -> None:
        """Restores the state of torch's host generator, a 1-D uint8 tensor."""
        torch.set_rng_state(state)

    def default_generator(self, index: int) -> torch.Generator:
        """Returns torch's host generator."""
        return torch.default_generator

    @property
    def Stream(self) -> Any:
        """Torch's placeholder class: the CPU has no streams."""
        return torch.cpu.Stream

    @property
    def Event(self) -> Any:
        """Torch's placeholder class: an event of the CPU is always complete."""
        return torch.cpu.Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Returns torch's CPU stream context, which does nothing."""
        return torch.cpu.stream(stream)

    def current_stream(self, index: Index = None) -> Any:
        """Returns torch's CPU stream, on which nothing waits."""
        return torch.cpu.current_stream()

    def empty_cache(self) -> None:
        """Does nothing: the host allocator keeps no cache that torch could return."""

    def memory_allocated(self, index: Index = None) -> int:
        """Returns the resident memory of this process, in bytes."""
        return host_memory.resident_bytes()

    def max_memory_allocated(self, index: Index = None) -> int:
        """Returns the peak resident memory of this process since the start or the last reset, in bytes."""
        return self._peak.read()

    def memory_reserved(self, index: Index = None) -> int:
        """Returns the resident memory of this process, in bytes."""
        return host_memory.resident_bytes()

    def max_memory_reserved(self, index: Index = None) -> int:
        """Returns the peak resident memory of this process since the start or the last reset, in bytes."""
        return self._peak.read()

    def reset_peak_memory_stats(self, index: Index = None) -> None:
        """Resets the peak to the current value."""
        self._peak.reset()

    def total_memory(self, index: Index = None) -> int:
        """Returns the RAM that this process may use, in bytes: the machine's, or its container's limit."""
        return host_memory.total_bytes()

    def available_memory(self, index: Index = None) -> int:
        """Returns the RAM that can still be allocated, in bytes."""
        return host_memory.available_bytes()

    def is_bf16_supported(self) -> bool:
        """Returns True: bf16 computes correctly on any CPU. ``cpu_has_bf16()`` returns whether it is fast."""
        return True

    def emulates(self, dtype: torch.dtype) -> bool:
        """Returns whether this processor has no instructions for ``dtype``."""
        native = {torch.float16: cpu_has_fp16, torch.bfloat16: cpu_has_bf16}.get(dtype)
        return native is not None and not native()

    def is_fp64_supported(self) -> bool:
        """Returns True."""
        return True

    def _tensor_type(self, dtype: torch.dtype) -> Any:
        return _TYPED_CLASSES[dtype]

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Returns ``tensor`` itself, flat (1-D) without ``match_shape``: page-locking has no use without a device."""
        return tensor if match_shape else tensor.reshape(-1)

    def pin_empty(self, *size: Any, dtype: torch.dtype | None = None, device: str = "cpu") -> torch.Tensor:
        """Returns an uninitialized host tensor, not page-locked. Raises ValueError: ``device`` is not the host."""
        if torch.device(device).type != "cpu":
            raise ValueError(f"pin_empty(device={device!r}): expected host memory; leave device at 'cpu'")
        return torch.empty(*size, dtype=dtype, device="cpu")

    def is_synchronized_device(self) -> bool:
        """Returns True: an operation is finished when its call returns."""
        return True

    def visible_devices_envs(self) -> list[str]:
        """Returns the CUDA variable, so that scripts that read it work on the CPU too."""
        return ["CUDA_VISIBLE_DEVICES"]


# torch's names for instructions that multiply bf16: x86 (AVX-512, AMX) and ARM (NEON, SVE).
_TORCH_BF16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
# The kernel's names for the same in /proc/cpuinfo ("flags" on x86, "Features" on ARM).
_KERNEL_BF16 = frozenset(("avx512_bf16", "amx_bf16", "bf16", "svebf16"))
_TORCH_FP16 = ("avx512_fp16", "amx_fp16", "fp16_arith")
_KERNEL_FP16 = frozenset(("avx512_fp16", "amx_fp16", "asimdhp"))


@functools.cache
def cpu_has_bf16() -> bool:
    """Returns whether this processor has native bf16 instructions.

    Without them bf16 is still correct on the CPU, but many times slower than fp32.
    """
    return _has(_TORCH_BF16, _KERNEL_BF16)


@functools.cache
def cpu_has_fp16() -> bool:
    """Returns whether this processor has native fp16 arithmetic; converting to and from fp16 does not count.

    Without it fp16 is still correct on the CPU, but tens of times slower than fp32.
    """
    return _has(_TORCH_FP16, _KERNEL_FP16)


def _has(torch_names: tuple[str, ...], kernel_flags: frozenset[str]) -> bool:
    if hasattr(torch.cpu, "get_capabilities"):  # older torch has no public query
        capabilities = torch.cpu.get_capabilities()
        if any(bool(capabilities.get(name)) for name in torch_names):
            return True
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and _flags_have(cpuinfo.read_text(), kernel_flags)


def _flags_have(cpuinfo: str, kernel_flags: frozenset[str]) -> bool:
    """Returns whether the text of ``/proc/cpuinfo`` names one of the instruction sets."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features") and kernel_flags & set(value.split()):
            return True
    return False


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_INT = 2**31 - 1
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Sets glibc's malloc to keep freed blocks for reuse, for the whole process.

    Does nothing where there is no glibc, or where the user has chosen an allocator or its settings by environment
    (``LD_PRELOAD``, ``MALLOC_*``, ``GLIBC_TUNABLES``).

    Returns:
        Whether the settings are in force.
    """
    if any(os.environ.get(name) for name in _USER_SETTINGS):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - raises AttributeError where this is not glibc
        mallopt = library.mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))


class MallocTrimmer:
    """Returns the freed memory that malloc caches to the system, from time to time.

    For phases that allocate short-lived tensors between long-lived ones: the gaps can rarely be reused, and together
    can be as large as the long-lived tensors. Does nothing without glibc.
    """

    _SHARE = 8

    def __init__(self) -> None:
        self._freed = 0
        self._trim: Callable[[int], int] | None
        try:
            self._trim = ctypes.CDLL(None).malloc_trim
        except (OSError, AttributeError):
            self._trim = None

    def note(self, freed: int, kept: int) -> None:
        """Counts freed bytes, and trims once they exceed 1 MiB and an eighth of ``kept``, the long-lived bytes."""
        self._freed += freed
        if self._trim is not None and self._freed > max(1 << 20, kept // self._SHARE):
            self._freed = 0
            self._trim(0)
