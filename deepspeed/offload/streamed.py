"""``offload_optimizer.update: "device"``: masters and states in host memory pass through the device to be updated.

For hosts with few cores. A chunk's master, gradient and states are copied up, updated by the device's kernel, and
copied back without the gradient. The next chunk comes up and the last one goes down meanwhile. The bits are those of an
update on the device without offload; on CPUs also those of an update on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from typing_extensions import override

from deepspeed.offload.streams import CopyHandle, CopyStream
from deepspeed.zero.placement import Tier
from deepspeed.zero.update.loop import Operands, UpdateSlice, UpdateStrategy
from deepspeed.zero.update.masters import MasterBucket

_SETS = 3  # one that comes up, one that is updated, one that goes down
MOST = 1 << 22
"""Largest number of elements of a chunk: 64 MiB of Adam's four fp32 tensors."""


@dataclass
class _DeviceBuffers:
    """Device memory of the tensors of one chunk, by name, and its copies in flight."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    up: CopyHandle = field(default_factory=CopyHandle)
    down: CopyHandle = field(default_factory=CopyHandle)

    def get(self, name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns memory for a tensor as long as ``like`` (1-D) and of its dtype."""
        held = self.tensors.get(name)
        if held is None or held.numel() < like.numel() or held.dtype != like.dtype:
            held = self.tensors[name] = torch.empty(like.numel(), dtype=like.dtype, device=device)
        return held[: like.numel()]


class StreamedUpdate(UpdateStrategy):
    """Updates masters in host memory on the device, chunk by chunk; three chunks are on the device at once.

    Args:
        chunk_numel: Largest number of elements in a chunk.
        up: The stream of copies to the device, which gathers of parameters in host memory use too.
        down: The stream of copies to the host, which gradients use too.
    """

    def __init__(self, device: torch.device, *, chunk_numel: int, up: CopyStream, down: CopyStream) -> None:
        self.chunk_numel = min(chunk_numel, MOST)
        self._device = device
        self._up, self._down = up, down
        self._unread: deque[UpdateSlice] = deque()
        self._free: deque[_DeviceBuffers] = deque()
        self._ready: deque[_DeviceBuffers] = deque()  # in the order of their chunks, the one that is updated first

    @override
    def begin(self, chunks: Sequence[UpdateSlice]) -> None:
        # The update writes compute shards in host memory; a gather whose wait() was not called may still read one.
        self._up.wait_on_host()
        self._unread = deque(chunks)
        self._free = deque(_DeviceBuffers() for _ in range(min(_SETS, len(chunks))))
        self._ready.clear()

    @override
    def fetch(self, chunk: UpdateSlice) -> Operands:
        while self._unread and len(self._ready) < 2:
            self._read_next()
        current = self._ready[0]
        current.up.wait()
        tensors = {name: current.get(name, source, self._device) for name, source in _tensors_of(chunk).items()}
        master, grad = tensors.pop("master"), tensors.pop("grad")
        return Operands(master, grad, tensors, self._out(chunk))

    def _read_next(self) -> None:
        chunk, target = self._unread.popleft(), self._free.popleft()
        with self._up.context():
            target.down.wait()  # the chunk that was there before
            for name, source in _tensors_of(chunk).items():
                target.up = self._up.copy(target.get(name, source, self._device), source)
        self._ready.append(target)

    @override
    def _out(self, chunk: UpdateSlice) -> torch.Tensor | None:
        master = chunk.master
        if master.out is None:
            return None
        out = master.out[chunk.start : chunk.stop]
        if master.bucket.memory.tensor_device == self._device:
            return out
        return self._ready[0].get("out", out, self._device)

    @override
    def store(self, chunk: UpdateSlice, operands: Operands, updated: Sequence[slice]) -> None:
        current = self._ready.popleft()
        sources = {"master": operands.master, **(operands.states or {})}
        targets = _tensors_of(chunk)
        for name, source in sources.items():
            current.down = self._down.copy(targets[name], source)
        master = chunk.master
        if master.out is not None and operands.out is not None and master.bucket.memory.tier is Tier.HOST:
            target = master.out[chunk.start : chunk.stop]
            for part in updated:
                current.down = self._down.copy(target[part], operands.out[part])
        self._free.append(current)

    @override
    def before_publish(self, master: MasterBucket) -> None:
        if master.bucket.memory.tier is Tier.HOST and master.bucket.group.combine is not None:
            self._down.wait_on_host()

    @override
    def finish(self) -> None:
        self._down.wait_on_host()
        self._unread.clear()
        self._free.clear()
        self._ready.clear()

    @override
    def close(self) -> None:
        self._up.wait_on_host()
        self._down.wait_on_host()


def _tensors_of(chunk: UpdateSlice) -> dict[str, torch.Tensor]:
    """Returns the tensors of a chunk in host memory by name: master, gradient and each state."""
    part = slice(chunk.start, chunk.stop)
    gradient = chunk.gradients.result
    assert gradient is not None, f"{chunk.master.bucket!r} has no gradient although one was counted"
    states = {key: state[part] for key, state in chunk.master.states.items()}
    return {"master": chunk.master.flat[part], "grad": gradient[part], **states}
