"""The update of masters that live in files: read ahead, update, write behind.

A chunk passes through a *set* of staging buffers, one for the master and one for each state. With one set everything
happens in turn; with more, the next chunk is read and the last one written while one is updated. Gradients are in host
memory and the compute parameters go where they live, as in the host's update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from typing_extensions import override

from deepspeed.offload.file_io import Transfer
from deepspeed.offload.files import FileMemory
from deepspeed.offload.host import HostUpdate
from deepspeed.offload.pinned import page_buffer, round_to_pages
from deepspeed.offload.streams import CopyStream
from deepspeed.zero.update.loop import Operands, UpdateSlice


@dataclass
class _StagingBuffers:
    """Staging buffers of one chunk."""

    buffers: list[torch.Tensor]
    transfers: list[Transfer] = field(default_factory=list)

    def wait(self) -> None:
        transfers, self.transfers = self.transfers, []
        for transfer in transfers:
            transfer.wait()


class FileUpdate(HostUpdate):
    """Updates masters chunk by chunk through staging buffers.

    Args:
        memory: The files.
        chunk_numel: Most elements of a chunk; whole pages of fp32.
        tensors: Tensors of a chunk: the master and its states.
        sets: Sets of buffers.
        reads_ahead: Read the next chunks while one is updated.
        writes_behind: Write the last chunks while one is updated.
        pin: Lock the pages of further buffers.
        up: Stream for copies to the device.
    """

    def __init__(
        self,
        memory: FileMemory,
        *,
        chunk_numel: int,
        tensors: int,
        sets: int,
        reads_ahead: bool,
        writes_behind: bool,
        pin: bool,
        up: CopyStream,
    ) -> None:
        super().__init__(chunk_numel=chunk_numel, pin=pin, up=up)
        self._memory = memory
        self._tensors = tensors
        self._count = sets
        self._reads_ahead = reads_ahead
        self._writes_behind = writes_behind
        self._sets: list[_StagingBuffers] | None = None
        self._unread: deque[UpdateSlice] = deque()
        self._reading: deque[_StagingBuffers] = deque()
        self._writing: deque[_StagingBuffers] = deque()
        self._current: _StagingBuffers | None = None

    @override
    def begin(self, chunks: Sequence[UpdateSlice]) -> None:
        super().begin(chunks)
        if self._sets is None and chunks:
            buffers = self._memory.take_buffers(self._count * self._tensors)
            self._sets = [_StagingBuffers(buffers[i :: self._count]) for i in range(self._count)]
        if chunks:
            self._fit_buffers(chunks)
        self._memory.settle()
        self._unread = deque(chunks)
        if self._reads_ahead:
            self._read_ahead()

    def _fit_buffers(self, chunks: Sequence[UpdateSlice]) -> None:
        """An optimizer may come to have more states, and a bucket unfrozen late be larger, than what it began with."""
        tensors = max(1 + len(chunk.master.states) for chunk in chunks)
        nbytes = max(self._memory.buffer_nbytes, *(round_to_pages(_widest(chunk) * chunk.numel) for chunk in chunks))
        for each in self._sets or []:
            each.buffers = [b if b.numel() >= nbytes else page_buffer(nbytes, pin=self._pin) for b in each.buffers]
            while len(each.buffers) < tensors:
                each.buffers.append(page_buffer(nbytes, pin=self._pin))

    def _tensors_of(self, chunk: UpdateSlice) -> dict[str, torch.Tensor]:
        """Master and states of a chunk, as mapped; the master under the name ``""``."""
        part = slice(chunk.start, chunk.stop)
        return {"": chunk.master.flat[part]} | {key: state[part] for key, state in chunk.master.states.items()}

    def _read_ahead(self) -> None:
        assert self._sets is not None or not self._unread
        while self._unread and self._sets:
            self._read_next()

    def _read_next(self) -> None:
        assert self._sets
        target = self._sets.pop()
        assert not target.transfers
        for buffer, tensor in zip(target.buffers, self._tensors_of(self._unread.popleft()).values(), strict=False):
            _, offset = self._memory.locate(tensor)
            whole = round_to_pages(tensor.numel() * tensor.element_size())
            target.transfers.append(self._memory.file.read(buffer[:whole], offset))
        self._reading.append(target)

    @override
    def fetch(self, chunk: UpdateSlice) -> Operands:
        if not self._reading:
            if not self._sets:
                self._free_oldest()
            self._read_next()
        self._current = current = self._reading.popleft()
        current.wait()
        if self._reads_ahead:
            self._read_ahead()
        operands = super().fetch(chunk)
        staged = {
            key: buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
            for buffer, (key, tensor) in zip(current.buffers, self._tensors_of(chunk).items(), strict=False)
        }
        return Operands(staged.pop(""), operands.grad, staged, operands.out)

    @override
    def store(self, chunk: UpdateSlice, operands: Operands, updated: Sequence[slice]) -> None:
        super().store(chunk, operands, updated)
        current, self._current = self._current, None
        assert current is not None
        for buffer, tensor in zip(current.buffers, self._tensors_of(chunk).values(), strict=False):
            _, offset = self._memory.locate(tensor)
            whole = round_to_pages(tensor.numel() * tensor.element_size())
            current.transfers.append(self._memory.file.write(buffer[:whole], offset))
        self._writing.append(current)
        if not self._writes_behind:
            self._free_oldest()
        elif self._reads_ahead and not self._sets and len(self._writing) > 1:
            self._free_oldest()
            self._read_ahead()

    def _free_oldest(self) -> None:
        assert self._sets is not None
        oldest = self._writing.popleft()
        self._sets.append(oldest)
        oldest.wait()

    @override
    def finish(self) -> None:
        super().finish()
        if self._sets is None:
            return
        while self._writing:
            self._free_oldest()
        for unused in (*self._reading, *([self._current] if self._current is not None else [])):
            self._sets.append(unused)
            unused.wait()
        self._reading.clear()
        self._current = None
        self._unread.clear()


def _widest(chunk: UpdateSlice) -> int:
    """Bytes per element of the widest tensor that a chunk cuts."""
    return max(tensor.element_size() for tensor in (chunk.master.flat, *chunk.master.states.values()))
