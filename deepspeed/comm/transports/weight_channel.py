"""Connections that carry weights from rank 0 of a trainer to the workers of an inference server.

The groups are beside torch's default group, and the trainer's other ranks are not members.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ports import free_port

GROUP = "weight_transfer"
"""Name of the group, and prefix of its keys in the store."""

_POLL = 0.02  # seconds


class WeightChannel(ABC):
    """A group of rank 0 and the server's workers.

    Args:
        address: This machine's, as the server sees it.
        world_size: The server's workers and 1.
        timeout: Seconds for joining and for each broadcast.
    """

    backend: str

    def __init__(self, address: str, world_size: int, timeout: float, device: torch.device) -> None:
        self.device = device  # where buffers to broadcast live
        self.address = address
        self.world_size = world_size
        self.port = 0  # where the workers meet this rank
        self._limit = timedelta(seconds=timeout)
        self._is_given_up = threading.Event()

    def give_up(self) -> None:
        """Ends a :meth:`join` to which no worker has come."""
        self._is_given_up.set()

    @abstractmethod
    def join(self) -> None:
        """Joins the group; blocks until the workers have, or after :meth:`give_up`. Runs in any thread."""

    @abstractmethod
    def broadcast(self, values: torch.Tensor) -> None:
        """Sends a tensor to all workers; returns when it is sent. Runs in any thread."""

    def settle(self) -> None:
        """Waits for what this thread has started on the device; another thread, with its own stream, sends it."""
        if self.device.type != "cpu":
            get_accelerator().current_stream(self.device.index).synchronize()


class TorchChannel(WeightChannel):
    """A group of torch's, over gloo, or over NCCL as SGLang makes it."""

    def __init__(self, address: str, world_size: int, timeout: float, device: torch.device | None = None) -> None:
        super().__init__(address, world_size, timeout, device or torch.device("cpu"))
        self.backend = "gloo" if device is None else "nccl"
        # Without waiting, since workers come during a call. Port 0: the store takes a free one.
        self._store = dist.TCPStore(address, 0, world_size, is_master=True, timeout=self._limit, wait_for_workers=False)
        self.port = self._store.port
        self._group: Any = None

    @override
    def join(self) -> None:
        # A group's constructor cannot be stopped. So it begins when a worker has written a key to the store.
        while self._store.num_keys() == 0:
            if self._is_given_up.wait(_POLL):
                return
        store = dist.PrefixStore(GROUP, self._store)
        if self.backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, 0, self.world_size, self._limit)
            return
        # torch puts a prefix for the group and one for the device before the keys of a group with a backend.
        store = dist.PrefixStore("cuda/", dist.PrefixStore(f"{GROUP}/", store))
        _use(self.device)
        self._group = dist.ProcessGroupNCCL(store, 0, self.world_size, dist.ProcessGroupNCCL.Options())

    @override
    def broadcast(self, values: torch.Tensor) -> None:
        sent = values.to(self.device).contiguous()
        how = dist.BroadcastOptions()
        how.rootRank = 0
        self._group.broadcast([sent], how).wait()
        self.settle()


class VllmNcclChannel(WeightChannel):
    """A communicator of NCCL as vLLM makes it, outside torch.distributed."""

    backend = "nccl"

    def __init__(self, address: str, world_size: int, timeout: float, device: torch.device) -> None:
        super().__init__(address, world_size, timeout, device)
        self.port = free_port()
        self._communicator: Any = None

    @override
    def join(self) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        _use(self.device)
        group = StatelessProcessGroup.create(host=self.address, port=self.port, rank=0, world_size=self.world_size)
        self._communicator = PyNcclCommunicator(group, device=self.device)

    @override
    def broadcast(self, values: torch.Tensor) -> None:
        _use(self.device)
        self._communicator.broadcast(values.to(self.device).contiguous(), src=0)
        self.settle()


def require_vllm() -> None:
    """Raises DeepSpeedConfigError: the package is missing whose communicator vLLM's workers use."""
    try:
        import vllm.distributed.utils  # noqa: F401
    except ImportError as error:
        raise DeepSpeedConfigError(
            f'ServerClient(transport="nccl", protocol="vllm"): expected the package vllm, found {error}; install it '
            'beside the trainer, or use transport="gloo" or "shared_memory"'
        ) from error


def _use(device: torch.device) -> None:
    """Makes a device the current one of this thread."""
    if device.index is not None:
        get_accelerator().set_device(device.index)
