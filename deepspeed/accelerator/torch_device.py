"""Accelerators for any device that torch has a module for (``torch.xpu``, ``torch.npu``, ``torch.mlu``, ...)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from typing_extensions import override

from deepspeed.accelerator.base import DeepSpeedAccelerator, Index, SingleDeviceAccelerator

# Backend for process groups, visible-device variables and exported prefixes, per device type.
_FACTS: dict[str, tuple[str, list[str], list[str]]] = {
    "xpu": ("xccl", ["ZE_AFFINITY_MASK"], ["CCL", "ZE"]),
    "npu": ("hccl", ["ASCEND_RT_VISIBLE_DEVICES"], ["HCCL", "ASCEND"]),
    "hpu": ("hccl", ["HABANA_VISIBLE_MODULES"], ["HABANA", "HCL"]),
    "mlu": ("cncl", ["MLU_VISIBLE_DEVICES"], ["CNCL"]),
    "sdaa": ("tccl", ["SDAA_VISIBLE_DEVICES"], ["TCCL"]),
    "supa": ("bccl", ["SUPA_VISIBLE_DEVICES"], ["BCCL", "BIREN", "SUPA"]),
}


class TorchDeviceAccelerator(DeepSpeedAccelerator):
    """A device reached through its torch module. ``communication_backend``: if None, looked up by ``name``."""

    def __init__(self, name: str, communication_backend: str | None = None) -> None:
        backend, visible, exports = _FACTS.get(name, (None, [], []))
        super().__init__(name, communication_backend or backend)
        self._visible: list[str] = visible
        self._exports: list[str] = exports

    @override
    def export_envs(self) -> list[str]:
        return list(self._exports)

    @override
    def visible_devices_envs(self) -> list[str]:
        return list(self._visible)


class CUDAAccelerator(TorchDeviceAccelerator):
    """The accelerator of CUDA and ROCm devices, with functions that only ``torch.cuda`` has."""

    def __init__(self) -> None:
        super().__init__("cuda", "nccl")

    def is_available(self) -> bool:
        """Returns whether there is a usable GPU.

        Torch counts by the management library if it is installed. That starts no context, so this process can still
        fork afterwards.
        """
        return torch.cuda.device_count() > 0

    @override
    def total_memory(self, index: Index = None) -> int:
        where = torch.cuda.current_device() if index is None else index
        if isinstance(where, str) and where.isdecimal():
            where = int(where)
        return int(torch.cuda.get_device_properties(where).total_memory)

    def is_fp16_supported(self) -> bool:
        """Returns whether the current device has fp16 arithmetic (compute capability 5.3)."""
        return torch.cuda.get_device_capability() >= (5, 3)

    def is_bf16_supported(self) -> bool:
        """Returns whether the current device computes in bf16, natively or emulated; see :meth:`emulates`."""
        return bool(torch.cuda.is_bf16_supported())

    def emulates(self, dtype: torch.dtype) -> bool:
        """Returns whether the current device has no instructions for ``dtype``: bf16 before compute capability 8.0."""
        return dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False)

    def is_fp64_supported(self) -> bool:
        """Returns True."""
        return True

    def is_triton_supported(self) -> bool:
        """Returns whether the current device runs Triton kernels (compute capability 7.0)."""
        return torch.cuda.get_device_capability() >= (7, 0)

    def range_push(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Opens an NVTX range."""
        torch.cuda.nvtx.range_push(msg)

    def range_pop(self, *args: Any, **kwargs: Any) -> None:
        """Closes the last NVTX range."""
        torch.cuda.nvtx.range_pop()

    def create_graph(self) -> Any:
        """Returns a new CUDA graph."""
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Returns a context that records device work into ``graph``."""
        return torch.cuda.graph(graph, pool=pool, stream=stream)

    @override
    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def export_envs(self) -> list[str]:
        """Returns the prefix of NCCL's variables, whose values must be equal on all hosts."""
        return ["NCCL"]

    def visible_devices_envs(self) -> list[str]:
        """Returns the variable that selects GPUs, in torch's ROCm build too."""
        return ["CUDA_VISIBLE_DEVICES"]


class MPSAccelerator(SingleDeviceAccelerator):
    """The accelerator of Apple GPUs. Torch counts no peaks there; a peak is the largest value that a call has read."""

    def __init__(self) -> None:
        # Process groups run over the host: torch has no collectives between Apple GPUs.
        super().__init__("mps", "gloo")
        self._peaks: dict[str, int] = {}

    def set_device(self, index: int) -> None:
        """Accepts index 0, the only device. Raises ValueError: ``index`` is not 0."""
        if index != 0:
            raise ValueError(f"set_device({index}): expected 0, as there is one mps device; use index 0")

    def device_count(self) -> int:
        """Returns 1 where torch sees the GPU, otherwise 0."""
        return torch.mps.device_count()

    def synchronize(self, index: Index = None) -> None:
        """Blocks until the GPU is idle."""
        torch.mps.synchronize()

    def is_available(self) -> bool:
        """Returns whether torch sees the GPU."""
        return torch.backends.mps.is_available()

    def manual_seed(self, seed: int) -> None:
        """Seeds the GPU's generator."""
        torch.mps.manual_seed(seed)

    def initial_seed(self) -> int:
        """Returns the seed that the GPU's generator started from."""
        return self.default_generator(0).initial_seed()

    def get_rng_state(self, index: Index = None) -> torch.Tensor:
        """Returns the generator's state."""
        return torch.mps.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, index: Index = None) -> None:
        """Restores the generator's state, a 1-D uint8 tensor."""
        torch.mps.set_rng_state(state)

    def default_generator(self, index: int) -> torch.Generator:
        """Returns the GPU's generator."""
        return torch.mps._get_default_mps_generator()

    @property
    def Stream(self) -> Any:
        """Torch's device-independent stream class; this device has only the default stream."""
        return torch.Stream

    @property
    def Event(self) -> Any:
        """The module's event class."""
        return torch.mps.Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Returns a context that does nothing: all work is queued in order."""
        return nullcontext()

    def current_stream(self, index: Index = None) -> Any:
        """Returns None: the device has one queue and no streams."""
        return None

    def empty_cache(self) -> None:
        """Returns cached memory to the system."""
        torch.mps.empty_cache()

    def memory_allocated(self, index: Index = None) -> int:
        """Returns the bytes in tensors."""
        return self._update_peak("allocated", torch.mps.current_allocated_memory())

    def max_memory_allocated(self, index: Index = None) -> int:
        """Returns the largest :meth:`memory_allocated` that a call has read."""
        self.memory_allocated()
        return self._peaks["allocated"]

    def memory_reserved(self, index: Index = None) -> int:
        """Returns the bytes that the driver holds for this process."""
        return self._update_peak("reserved", torch.mps.driver_allocated_memory())

    def max_memory_reserved(self, index: Index = None) -> int:
        """Returns the largest :meth:`memory_reserved` that a call has read."""
        self.memory_reserved()
        return self._peaks["reserved"]

    def _update_peak(self, kind: str, value: int) -> int:
        self._peaks[kind] = max(self._peaks.get(kind, 0), value)
        return value

    @override
    def reset_peak_memory_stats(self, index: Index = None) -> None:
        self._peaks.clear()

    def total_memory(self, index: Index = None) -> int:
        """Returns the largest number of bytes that the system recommends the GPU to use."""
        return torch.mps.recommended_max_memory()

    def available_memory(self, index: Index = None) -> int:
        """Returns the free part of :meth:`total_memory`."""
        return max(0, self.total_memory() - self.memory_reserved())

    def is_bf16_supported(self) -> bool:
        """Returns whether the system is macOS 14 or newer, where MPS has bf16."""
        return torch.backends.mps.is_macos_or_newer(14, 0)

    def is_fp64_supported(self) -> bool:
        """Returns False: the GPU has no fp64."""
        return False
