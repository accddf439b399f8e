"""Apple GPUs: one device, memory shared with the host, no streams and no process groups of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepspeed.accelerator.base import DeepSpeedAccelerator, Index


class MPSAccelerator(DeepSpeedAccelerator):
    """What ``torch.mps`` offers; peaks are not counted by torch, so they are the largest value a call has seen."""

    def __init__(self) -> None:
        # Process groups run over the host: torch has no collectives between Apple GPUs.
        super().__init__("mps", "gloo")
        self._peaks: dict[str, int] = {}

    def device(self, index: Index = None) -> AbstractContextManager[Any]:
        """A context that does nothing: there is one device."""
        return nullcontext()

    def set_device(self, index: int) -> None:
        """Accepts the one device.

        Raises:
            ValueError: ``index`` is not 0.
        """
        if index != 0:
            raise ValueError(f"set_device({index}): this machine has one mps device; use index 0")

    def current_device(self) -> int:
        """Always 0."""
        return 0

    def device_count(self) -> int:
        """1 where torch sees the GPU, otherwise 0."""
        return torch.mps.device_count()

    def synchronize(self, index: Index = None) -> None:
        """Blocks until the GPU is idle."""
        torch.mps.synchronize()

    def is_available(self) -> bool:
        """Whether torch sees the GPU."""
        return torch.backends.mps.is_available()

    def manual_seed(self, seed: int) -> None:
        """Seeds the GPU's generator."""
        torch.mps.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds the GPU's generator."""
        torch.mps.manual_seed(seed)

    def initial_seed(self) -> int:
        """The seed that the GPU's generator started from."""
        return self.default_generator(0).initial_seed()

    def get_rng_state(self, index: Index = None) -> torch.Tensor:
        """The generator's state."""
        return torch.mps.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, index: Index = None) -> None:
        """Restores the generator's state, 1-D bytes."""
        torch.mps.set_rng_state(state)

    def default_generator(self, index: int) -> torch.Generator:
        """The GPU's generator."""
        return torch.mps._get_default_mps_generator()

    @property
    def Stream(self) -> Any:
        """Torch's device-independent stream class; this device has the default one only."""
        return torch.Stream

    @property
    def Event(self) -> Any:
        """The module's event class."""
        return torch.mps.Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context that does nothing: all work is queued in order."""
        return nullcontext()

    def current_stream(self, index: Index = None) -> Any:
        """None: there is only the queue of the device."""
        return None

    def default_stream(self, index: Index = None) -> Any:
        """None: there is only the queue of the device."""
        return None

    def empty_cache(self) -> None:
        """Returns cached memory to the system."""
        torch.mps.empty_cache()

    def memory_allocated(self, index: Index = None) -> int:
        """Bytes in tensors."""
        return self._seen("allocated", torch.mps.current_allocated_memory())

    def max_memory_allocated(self, index: Index = None) -> int:
        """The largest :meth:`memory_allocated` seen by a call."""
        self.memory_allocated()
        return self._peaks["allocated"]

    def memory_reserved(self, index: Index = None) -> int:
        """Bytes that the driver holds for this process."""
        return self._seen("reserved", torch.mps.driver_allocated_memory())

    def max_memory_reserved(self, index: Index = None) -> int:
        """The largest :meth:`memory_reserved` seen by a call."""
        self.memory_reserved()
        return self._peaks["reserved"]

    def _seen(self, kind: str, value: int) -> int:
        self._peaks[kind] = max(self._peaks.get(kind, 0), value)
        return value

    def memory_stats(self, index: Index = None) -> dict[str, Any]:
        """Bytes in tensors, now and at most."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def reset_peak_memory_stats(self, index: Index = None) -> None:
        """Starts the peaks afresh."""
        self._peaks.clear()

    def total_memory(self, index: Index = None) -> int:
        """Bytes that the system recommends the GPU to use at most."""
        return torch.mps.recommended_max_memory()

    def available_memory(self, index: Index = None) -> int:
        """What is left of :meth:`total_memory`."""
        return max(0, self.total_memory() - self.memory_reserved())

    def is_fp16_supported(self) -> bool:
        """True."""
        return True

    def is_bf16_supported(self) -> bool:
        """Whether the system is new enough (macOS 14)."""
        return torch.backends.mps.is_macos_or_newer(14, 0)

    def is_fp64_supported(self) -> bool:
        """False: the GPU has no fp64."""
        return False
