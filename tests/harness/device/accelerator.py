"""An accelerator of the package whose streams and events are clocks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from deepspeed.accelerator.cpu import CPUAccelerator
from tests.harness.device import clocks as simulated
from tests.harness.device.clocks import Clocks
from tests.harness.device.memory import Memory


class SimulatedAccelerator(CPUAccelerator):
    """A device that is called ``cuda``, with memory of its own and streams.

    Args:
        clocks: Of the device.
        memory: Its record of storages, from which memory figures are read.
    """

    def __init__(self, clocks: Clocks, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self._name = "cuda"
        self._communication_backend_name = "nccl"
        self._clocks = clocks

    def device_name(self, index: Any = None) -> str:
        return "cuda" if index is None else f"cuda:{index}"

    @property
    def computes_in_host_memory(self) -> bool:
        return False

    def synchronize(self, index: Any = None) -> None:
        self._clocks.synchronize()

    def memory_allocated(self, index: Any = None) -> int:
        return self._memory.device.allocated

    def max_memory_allocated(self, index: Any = None) -> int:
        return self._memory.device.allocated_peak

    def memory_reserved(self, index: Any = None) -> int:
        return self._memory.device.reserved

    def max_memory_reserved(self, index: Any = None) -> int:
        return self._memory.device.reserved_peak

    def reset_peak_memory_stats(self, index: Any = None) -> None:
        self._memory.device.reset_peaks()

    def empty_cache(self) -> None:
        self._memory.device.empty_cache()

    @property
    def Stream(self) -> Any:
        return lambda *_arguments, **_options: self._clocks.new_stream()

    @property
    def Event(self) -> Any:
        return self._clocks.new_event

    def stream(self, stream: simulated.Stream | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else on_stream(self._clocks, stream)

    def current_stream(self, index: Any = None) -> simulated.Stream:
        return self._clocks.current

    def default_stream(self, index: Any = None) -> simulated.Stream:
        return self._clocks.default

    def is_synchronized_device(self) -> bool:
        return False

    @property
    def autocast_dtype(self) -> torch.dtype:
        return torch.get_autocast_dtype("cpu")

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        return torch.autocast(device_type="cpu", dtype=dtype)

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        pinned = tensor.contiguous().pin_memory()
        return pinned if match_shape else pinned.reshape(-1)

    def pin_empty(self, *size: Any, dtype: torch.dtype | None = None, device: str = "cpu") -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="cpu", pin_memory=True)


@contextmanager
def on_stream(clocks: Clocks, stream: simulated.Stream) -> Iterator[None]:
    """Queues the work of the block on ``stream``."""
    before, clocks.current = clocks.current, stream
    try:
        yield
    finally:
        clocks.current = before
