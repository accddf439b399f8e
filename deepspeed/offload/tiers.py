"""Builds the tiers of one engine from the configuration: memories, gradient destinations, update strategies.

Masters in files are updated in chunks. A chunk passes through a *set* of staging buffers, one for the master and one
for each state. With one set, reads, updates and writes are sequential; with more, the next chunk is read and the
previous one written during an update. Gradients and compute parameters are handled as in the host's update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from typing_extensions import override

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.transports.transport import Transport
from deepspeed.config.sections.offload import OffloadOptimizer, OffloadParam
from deepspeed.config.sections.root import Root
from deepspeed.errors import OffloadError, require_state
from deepspeed.logging import log_dist
from deepspeed.offload.file_io import IoSettings, Transfer
from deepspeed.offload.files import BufferSize, CachePolicy, FileMemory, FileSettings
from deepspeed.offload.host import HostGradientDestination, HostMemory, HostUpdate, StagingPool
from deepspeed.offload.pinned import may_pin, page_buffer, round_to_pages
from deepspeed.offload.streamed import StreamedUpdate
from deepspeed.offload.streams import CopyStream
from deepspeed.offload.threads import CoreLease
from deepspeed.zero.gradient.gradient_sum import GradientDestination
from deepspeed.zero.placement import Placement, Tier
from deepspeed.zero.storage import Memory, MemoryTracker
from deepspeed.zero.update.loop import Operands, UpdateSlice, UpdateStrategy

_CHUNK = 4096  # elements; multiples of it are whole pages in every dtype
_FILE_CHUNK = 1 << 22  # largest chunk in staging buffers, in elements: 16 MiB of fp32


@dataclass
class OffloadTiers:
    """The tiers of one engine."""

    param_memories: Mapping[Tier, Memory]  # the memories of compute shards, by tier
    master_memories: Mapping[Tier, Memory]  # the memories of masters and optimizer states, by tier
    strategies: Mapping[Tier, UpdateStrategy]  # the strategies that update masters, by tier
    _pool: StagingPool
    _host_is_device: bool
    _cores: CoreLease | None  # where something is offloaded

    def destination(self, tier: Tier, memory_tracker: MemoryTracker) -> GradientDestination:
        """Returns the destination that moves the gradients of one bucket to ``tier``."""
        if tier is Tier.DEVICE or self._host_is_device:
            return GradientDestination(tier)
        return HostGradientDestination(self._pool, memory_tracker)

    def close(self) -> None:
        """Releases all memory and files. May be called twice."""
        for strategy in self.strategies.values():
            strategy.close()
        for memory in (*self.param_memories.values(), *self.master_memories.values()):
            memory.close()
        if self._cores is not None:
            self._cores.give_back()


def open_tiers(
    root: Root,
    placement: Placement,
    device: torch.device,
    job: Transport,
    *,
    rank: int,
    ranks_here: int,
    state_itemsizes: Sequence[int],
    is_trained: bool,
) -> OffloadTiers:
    """Opens the tiers that ``placement`` uses. Files are created when the runtime announces their tensors.

    Every rank must call it, as it also chooses the threads of updates on the host.

    Args:
        job: Joins all ranks that train.
        state_itemsizes: Bytes per element of every optimizer state.
        is_trained: Whether there is an optimizer.
    """
    zero = root.zero_optimization
    optimizer, param = zero.offload_optimizer, zero.offload_param
    pin_masters = Tier.DEVICE is not placement.master_tier and may_pin(optimizer is None or optimizer.pin_memory)
    keeps_params = {placement.param_tier, placement.base_tier} != {Tier.DEVICE}
    pin_params = keeps_params and may_pin(param is None or param.pin_memory)
    up, down = CopyStream(device), CopyStream(device)
    params: dict[Tier, Memory] = {Tier.DEVICE: Memory(device)}
    masters: dict[Tier, Memory] = {Tier.DEVICE: params[Tier.DEVICE]}
    strategies: dict[Tier, UpdateStrategy] = {Tier.DEVICE: UpdateStrategy()}
    if keeps_params:
        params[Tier.HOST] = HostMemory(device, pin=pin_params, up=up)
    if placement.master_tier is Tier.HOST:
        masters[Tier.HOST] = HostMemory(device, pin=pin_masters, up=up)
        chunk = _whole_chunks(zero.sub_group_size)
        if optimizer is not None and optimizer.update == "device":
            strategies[Tier.HOST] = StreamedUpdate(device, chunk_numel=chunk, up=up, down=down)
        else:
            strategies[Tier.HOST] = HostUpdate(chunk_numel=chunk, pin=pin_masters, up=up)
    aio = root.aio
    io = IoSettings(block_size=aio.block_size, queue_depth=aio.queue_depth, threads=aio.intra_op_parallelism)
    if param is not None and placement.param_tier is Tier.FILE:
        cache = CachePolicy(param.page_cache, is_trained, ranks_here)
        settings = FileSettings(str(param.nvme_path), "parameters", rank, io, pin_params, cache=cache)
        size: BufferSize = partial(_largest_shard, param)
        count = max(param.buffer_count, 1)
        params[Tier.FILE] = FileMemory(device, settings, buffer_count=count, buffer_bytes=size, up=up)
    if optimizer is not None and placement.master_tier is Tier.FILE:
        tensors = 1 + len(state_itemsizes)  # of a chunk: the master and its states
        least = 1 + optimizer.pipeline_read + optimizer.pipeline_write
        sets = least if least == 1 else max(least, optimizer.buffer_count // tensors)
        if sets * tensors > optimizer.buffer_count:
            log_dist(
                f"zero_optimization.offload_optimizer.buffer_count: using {sets * tensors} buffers instead of "
                f"{optimizer.buffer_count}: {sets} chunks at a time, each of {tensors} tensors (master and states)"
            )
        chunk = min(_whole_chunks(zero.sub_group_size), _FILE_CHUNK)
        zeros = not optimizer.fast_init
        settings = FileSettings(str(optimizer.nvme_path), "optimizer", rank, io, pin_masters, zeros_are_written=zeros)
        size = partial(_largest_chunk, chunk)
        # One buffer is for writes outside the update.
        memory = FileMemory(device, settings, buffer_count=sets * tensors + 1, buffer_bytes=size, up=up)
        masters[Tier.FILE] = memory
        strategies[Tier.FILE] = FileUpdate(memory, optimizer, chunk, tensors, sets, pin=pin_masters, up=up)
    return OffloadTiers(
        param_memories=params,
        master_memories=masters,
        strategies=strategies,
        _pool=StagingPool(pin=pin_masters, down=down),
        _host_is_device=get_accelerator().shares_host_memory(device),
        _cores=CoreLease(job) if len(placement.tiers) > 1 else None,
    )


def _whole_chunks(numel: int) -> int:
    return -(-max(numel, 1) // _CHUNK) * _CHUNK


def _largest_shard(section: OffloadParam, tensors: Sequence[tuple[int, int]]) -> int:
    largest, itemsize = max(tensors)
    if largest > section.buffer_size:
        raise OffloadError(
            f"zero_optimization.offload_param.buffer_size: expected at least {largest:,} elements, the largest "
            f"shard; found {section.buffer_size:,}. Raise it, or lower reduce_bucket_size, which limits the "
            "shards of one module"
        )
    return largest * itemsize


def _largest_chunk(chunk: int, tensors: Sequence[tuple[int, int]]) -> int:
    return max(min(_whole_chunks(numel), chunk) * itemsize for numel, itemsize in tensors)


@dataclass
class _StagingBuffers:
    """The staging buffers of one chunk, and their transfers in flight."""

    buffers: list[torch.Tensor]
    transfers: list[Transfer] = field(default_factory=list)

    def wait(self) -> None:
        transfers, self.transfers = self.transfers, []
        for transfer in transfers:
            transfer.wait()


class FileUpdate(HostUpdate):
    """Updates masters chunk by chunk through staging buffers.

    Args:
        chunk_numel: Largest number of elements in a chunk; whole pages in every dtype.
        tensors: Number of tensors of a chunk: the master and its states.
        sets: Number of chunks in staging buffers at a time: read ahead, updated or written behind.
        pin: Lock the pages of buffers that are added later.
    """

    def __init__(
        self,
        memory: FileMemory,
        section: OffloadOptimizer,
        chunk_numel: int,
        tensors: int,
        sets: int,
        *,
        pin: bool,
        up: CopyStream,
    ) -> None:
        super().__init__(chunk_numel=chunk_numel, pin=pin, up=up)
        self._memory, self._tensors, self._count = memory, tensors, sets
        self._reads_ahead, self._writes_behind = section.pipeline_read, section.pipeline_write
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
        """Adds or enlarges buffers if needed: for new optimizer states, or a larger bucket that was unfrozen."""
        tensors = max(1 + len(chunk.master.states) for chunk in chunks)
        nbytes = max(self._memory.buffer_nbytes, *(round_to_pages(_widest(chunk) * chunk.numel) for chunk in chunks))
        for each in self._sets or []:
            each.buffers = [b if b.numel() >= nbytes else page_buffer(nbytes, pin=self._pin) for b in each.buffers]
            while len(each.buffers) < tensors:
                each.buffers.append(page_buffer(nbytes, pin=self._pin))

    def _tensors_of(self, chunk: UpdateSlice) -> dict[str, torch.Tensor]:
        part = slice(chunk.start, chunk.stop)
        return {"": chunk.master.flat[part]} | {key: state[part] for key, state in chunk.master.states.items()}

    def _read_ahead(self) -> None:
        assert self._sets is not None or not self._unread
        while self._unread and self._sets:
            self._read_next()

    def _read_next(self) -> None:
        assert self._sets
        target = self._sets.pop()
        require_state(not target.transfers, self, "staging buffers without transfers")
        for buffer, tensor in zip(target.buffers, self._tensors_of(self._unread.popleft()).values(), strict=False):
            _, offset = self._memory.locate(tensor)
            nbytes = round_to_pages(tensor.nbytes)
            target.transfers.append(self._memory.file.read(buffer[:nbytes], offset))
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
            key: buffer[: tensor.nbytes].view(tensor.dtype)
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
            nbytes = round_to_pages(tensor.nbytes)
            current.transfers.append(self._memory.file.write(buffer[:nbytes], offset))
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
    """Returns the largest number of bytes per element of a chunk's tensors."""
    return max(tensor.element_size() for tensor in (chunk.master.flat, *chunk.master.states.values()))
