"""The CPU as an accelerator: one device, synchronous, memory figures are those of the process."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepspeed.accelerator import host_memory
from deepspeed.accelerator.base import DeepSpeedAccelerator, Index
from deepspeed.accelerator.cpu_features import cpu_has_bf16, cpu_has_fp16

_TYPED_CLASSES: dict[torch.dtype, Any] = {
    torch.float: torch.FloatTensor,
    torch.half: torch.HalfTensor,
    torch.bfloat16: torch.BFloat16Tensor,
    torch.double: torch.DoubleTensor,
    torch.int: torch.IntTensor,
    torch.long: torch.LongTensor,
    torch.uint8: torch.ByteTensor,
}


class CPUAccelerator(DeepSpeedAccelerator):
    """The processor and its memory. Device strings carry no index."""

    def __init__(self) -> None:
        super().__init__("cpu", "gloo")
        self._peak = host_memory.PeakResidentMemory()

    def device_name(self, index: Index = None) -> str:
        """Always ``"cpu"``."""
        return "cpu"

    def device(self, index: Index = None) -> AbstractContextManager[Any]:
        """A context that does nothing: there is one device."""
        return nullcontext()

    def set_device(self, index: int) -> None:
        """Does nothing: there is one device, whatever the local rank."""

    def current_device(self) -> int:
        """Always 0."""
        return 0

    def device_count(self) -> int:
        """The ranks on this machine, which take the place of devices: the launcher's ``LOCAL_SIZE``, else 1."""
        local_size = os.environ.get("LOCAL_SIZE", "")
        return max(int(local_size), 1) if local_size.isdecimal() else 1

    def synchronize(self, index: Index = None) -> None:
        """Does nothing: a call that returned is finished."""

    def is_available(self) -> bool:
        """Always True."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Seeds torch's generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds torch's generator."""
        torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """The seed that torch's generator started from."""
        return torch.initial_seed()

    def get_rng_state(self, index: Index = None) -> torch.Tensor:
        """The state of torch's host generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, index: Index = None) -> None:
        """Restores the state of torch's host generator, 1-D bytes."""
        torch.set_rng_state(state)

    def default_generator(self, index: int) -> torch.Generator:
        """Torch's host generator."""
        return torch.default_generator

    @property
    def Stream(self) -> Any:
        """Torch's stand-in class: the CPU has no streams."""
        return torch.cpu.Stream

    @property
    def Event(self) -> Any:
        """Torch's stand-in class: an event of the CPU is always reached."""
        return torch.cpu.Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Torch's stand-in context."""
        return torch.cpu.stream(stream)

    def current_stream(self, index: Index = None) -> Any:
        """Torch's stand-in stream."""
        return torch.cpu.current_stream()

    def default_stream(self, index: Index = None) -> Any:
        """Torch's stand-in stream."""
        return torch.cpu.current_stream()

    def empty_cache(self) -> None:
        """Does nothing: the host allocator keeps no cache that torch could return."""

    def memory_allocated(self, index: Index = None) -> int:
        """Resident memory of this process."""
        return host_memory.resident_bytes()

    def max_memory_allocated(self, index: Index = None) -> int:
        """Peak resident memory of this process since the start or the last reset."""
        return self._peak.read()

    def memory_reserved(self, index: Index = None) -> int:
        """Resident memory of this process."""
        return host_memory.resident_bytes()

    def max_memory_reserved(self, index: Index = None) -> int:
        """Peak resident memory of this process since the start or the last reset."""
        return self._peak.read()

    def memory_stats(self, index: Index = None) -> dict[str, Any]:
        """Resident memory under the two names that torch's allocators use."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def reset_peak_memory_stats(self, index: Index = None) -> None:
        """Starts the peak afresh."""
        self._peak.reset()

    def total_memory(self, index: Index = None) -> int:
        """RAM that this process may use: the machine's, or its container's limit."""
        return host_memory.total_bytes()

    def available_memory(self, index: Index = None) -> int:
        """RAM that can still be allocated."""
        return host_memory.available_bytes()

    def is_fp16_supported(self) -> bool:
        """True: fp16 trains on the CPU too (upstream says no)."""
        return True

    def is_bf16_supported(self) -> bool:
        """True: bf16 computes correctly on any CPU. Whether it is fast, ``cpu_has_bf16()`` says."""
        return True

    def emulates(self, dtype: torch.dtype) -> bool:
        """Returns whether this processor has no instructions for ``dtype``."""
        native = {torch.float16: cpu_has_fp16, torch.bfloat16: cpu_has_bf16}.get(dtype)
        return native is not None and not native()

    def is_fp64_supported(self) -> bool:
        """True."""
        return True

    def _tensor_type(self, dtype: torch.dtype) -> Any:
        """Torch's typed class, such as ``torch.FloatTensor``."""
        return _TYPED_CLASSES[dtype]

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Returns ``tensor`` in ordinary host memory; without another device, page-locking brings nothing.

        ``tensor`` itself comes back, as from torch for one that is pinned already; flat (1-D) without ``match_shape``.
        """
        return tensor if match_shape else tensor.reshape(-1)

    def pin_empty(self, *size: Any, dtype: torch.dtype | None = None, device: str = "cpu") -> torch.Tensor:
        """An uninitialised host tensor (not page-locked: see :meth:`pin_memory`).

        Raises:
            ValueError: ``device`` is not the host.
        """
        if torch.device(device).type != "cpu":
            raise ValueError(f"pin_empty(device={device!r}): this is host memory; leave device at 'cpu'")
        return torch.empty(*size, dtype=dtype, device="cpu")

    def is_synchronized_device(self) -> bool:
        """True: a call that returned is finished."""
        return True

    def visible_devices_envs(self) -> list[str]:
        """The CUDA variable, so that scripts which read it see the same on every kind of device."""
        return ["CUDA_VISIBLE_DEVICES"]
