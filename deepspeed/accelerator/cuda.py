"""NVIDIA GPUs, and AMD GPUs through torch's ROCm build, which uses the same names."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from deepspeed.accelerator.base import Index
from deepspeed.accelerator.torch_device import TorchDeviceAccelerator


class CUDAAccelerator(TorchDeviceAccelerator):
    """What ``torch.cuda`` offers beyond the common part."""

    def __init__(self) -> None:
        super().__init__("cuda", "nccl")

    def is_available(self) -> bool:
        """Whether there is a usable GPU.

        Counted through the management library where it is there, which starts no context: a process that asked can
        still fork.
        """
        return torch.cuda.device_count() > 0

    def memory_stats(self, index: Index = None) -> dict[str, Any]:
        """The caching allocator's figures."""
        return dict(torch.cuda.memory_stats(index))

    def total_memory(self, index: Index = None) -> int:
        """Bytes that the device has."""
        return int(torch.cuda.get_device_properties(self._ordinal(index)).total_memory)

    def is_fp16_supported(self) -> bool:
        """Whether the current device has fp16 arithmetic (compute capability 5.3)."""
        return torch.cuda.get_device_capability() >= (5, 3)

    def is_bf16_supported(self) -> bool:
        """Whether the current device computes in bf16, natively or emulated; :meth:`emulates` tells them apart."""
        return bool(torch.cuda.is_bf16_supported())

    def emulates(self, dtype: torch.dtype) -> bool:
        """Returns whether the current device has no instructions for ``dtype``: bf16 before compute capability 8.0."""
        return dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False)

    def is_fp64_supported(self) -> bool:
        """True."""
        return True

    def is_triton_supported(self) -> bool:
        """Whether the current device runs Triton kernels (compute capability 7.0)."""
        return torch.cuda.get_device_capability() >= (7, 0)

    def range_push(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Opens an NVTX range."""
        torch.cuda.nvtx.range_push(msg)

    def range_pop(self, *args: Any, **kwargs: Any) -> None:
        """Closes the last NVTX range."""
        torch.cuda.nvtx.range_pop()

    def create_graph(self) -> Any:
        """A new CUDA graph."""
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """A context that records device work into ``graph``."""
        return torch.cuda.graph(graph, pool=pool, stream=stream)

    def replay_graph(self, graph: Any) -> None:
        """Runs what ``graph`` recorded."""
        graph.replay()

    def export_envs(self) -> list[str]:
        """NCCL's settings must be equal on all hosts."""
        return ["NCCL"]

    def visible_devices_envs(self) -> list[str]:
        """The variable that chooses GPUs (torch's ROCm build honours it too)."""
        return ["CUDA_VISIBLE_DEVICES"]

    def _ordinal(self, index: Index) -> int:
        return torch.cuda.current_device() if index is None else int(index)
