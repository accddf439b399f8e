"""From the configuration to the tiers of one engine: memories, destinations of gradients, update strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.config.sections.offload import OffloadOptimizer, OffloadParam
from deepspeed.config.sections.root import Root
from deepspeed.errors import OffloadError
from deepspeed.logging import log_dist
from deepspeed.offload.file_io import IoSettings
from deepspeed.offload.file_update import FileUpdate
from deepspeed.offload.files import BufferSize, CachePolicy, FileMemory, FileSettings
from deepspeed.offload.host import HostGradientDestination, HostMemory, HostUpdate, StagingPool
from deepspeed.offload.pinned import may_pin
from deepspeed.offload.streams import CopyStream
from deepspeed.zero.gradient.gradient_sum import GradientDestination
from deepspeed.zero.placement import Placement, Tier
from deepspeed.zero.storage import Memory, MemoryTracker
from deepspeed.zero.update.loop import UpdateStrategy

_CHUNK = 4096  # elements; chunks are multiples of it: whole pages in every dtype
_FILE_CHUNK = 1 << 22  # most elements of a chunk that passes through staging buffers: 16 MiB of fp32


@dataclass
class OffloadTiers:
    """The tiers of one engine.

    Attributes:
        param_memories: Where compute shards are kept, by tier.
        master_memories: Where masters and optimizer states are kept, by tier.
        strategies: How masters are updated, by tier.
    """

    param_memories: Mapping[Tier, Memory]
    master_memories: Mapping[Tier, Memory]
    strategies: Mapping[Tier, UpdateStrategy]
    _pool: StagingPool
    _host_is_device: bool

    def destination(self, tier: Tier, memory_tracker: MemoryTracker) -> GradientDestination:
        """Returns what brings the gradients of one bucket to ``tier``."""
        if tier is Tier.DEVICE or self._host_is_device:
            return GradientDestination(tier)
        return HostGradientDestination(self._pool, memory_tracker)

    def close(self) -> None:
        """Gives everything back. May be called twice."""
        for strategy in self.strategies.values():
            strategy.close()
        for memory in (*self.param_memories.values(), *self.master_memories.values()):
            memory.close()


def open_tiers(
    root: Root,
    placement: Placement,
    device: torch.device,
    *,
    rank: int,
    ranks_here: int,
    state_itemsizes: Sequence[int],
    is_trained: bool,
) -> OffloadTiers:
    """Opens the tiers that ``placement`` uses. Files are made when the runtime says what they will hold.

    Args:
        root: The configuration.
        placement: What it asks for.
        device: Where the model computes.
        rank: Global rank, for the names of folders.
        ranks_here: Ranks on this host.
        state_itemsizes: Bytes per element of every optimizer state.
        is_trained: There is an optimizer.
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
        strategies[Tier.HOST] = HostUpdate(chunk_numel=chunk, pin=pin_masters, up=up)
    if param is not None and placement.param_tier is Tier.FILE:
        cache = CachePolicy(param.page_cache, is_trained, ranks_here)
        params[Tier.FILE] = _param_files(root, param, device, rank=rank, pin=pin_params, up=up, cache=cache)
    if optimizer is not None and placement.master_tier is Tier.FILE:
        memory, strategy = _master_files(
            root, optimizer, device, rank=rank, pin=pin_masters, up=up, tensors=1 + len(state_itemsizes)
        )
        masters[Tier.FILE], strategies[Tier.FILE] = memory, strategy
    return OffloadTiers(
        param_memories=params,
        master_memories=masters,
        strategies=strategies,
        _pool=StagingPool(pin=pin_masters, down=down),
        _host_is_device=get_accelerator().shares_host_memory(device),
    )


def _whole_chunks(numel: int) -> int:
    return -(-numel // _CHUNK) * _CHUNK


def _io_settings(root: Root) -> IoSettings:
    aio = root.aio
    return IoSettings(block_size=aio.block_size, queue_depth=aio.queue_depth, threads=aio.intra_op_parallelism)


def _param_files(
    root: Root,
    section: OffloadParam,
    device: torch.device,
    *,
    rank: int,
    pin: bool,
    up: CopyStream,
    cache: CachePolicy,
) -> FileMemory:
    assert section.nvme_path is not None

    def buffer_bytes(tensors: Sequence[tuple[int, int]]) -> int:
        largest, itemsize = max(tensors)
        if largest > section.buffer_size:
            raise OffloadError(
                f"zero_optimization.offload_param.buffer_size: a buffer must hold the largest shard, which has "
                f"{largest:,} elements; found {section.buffer_size:,}. Raise it, or lower reduce_bucket_size, which "
                "bounds the shards of one module"
            )
        return largest * itemsize

    settings = FileSettings(str(section.nvme_path), "parameters", rank, _io_settings(root), pin, cache=cache)
    return FileMemory(device, settings, buffer_count=section.buffer_count, buffer_bytes=buffer_bytes, up=up)


def _master_files(
    root: Root,
    section: OffloadOptimizer,
    device: torch.device,
    *,
    rank: int,
    pin: bool,
    up: CopyStream,
    tensors: int,
) -> tuple[FileMemory, FileUpdate]:
    assert section.nvme_path is not None
    wanted = 1 + section.pipeline_read + section.pipeline_write
    sets = wanted if wanted == 1 else max(wanted, section.buffer_count // tensors)
    if sets * tensors > section.buffer_count:
        log_dist(
            f"zero_optimization.offload_optimizer.buffer_count: {sets * tensors} buffers are used instead of "
            f"{section.buffer_count}: {tensors} tensors of a chunk (master and states), {sets} chunks at a time"
        )
    chunk = min(_whole_chunks(root.zero_optimization.sub_group_size), _FILE_CHUNK)

    def buffer_bytes(entries: Sequence[tuple[int, int]]) -> int:
        return max(min(_whole_chunks(numel), chunk) * itemsize for numel, itemsize in entries)

    size: BufferSize = buffer_bytes
    settings = FileSettings(
        str(section.nvme_path),
        "optimizer",
        rank,
        _io_settings(root),
        pin,
        zeros_are_written=not section.fast_init,
    )
    # One buffer more than the update needs, for values that are written at other times.
    memory = FileMemory(device, settings, buffer_count=sets * tensors + 1, buffer_bytes=size, up=up)
    strategy = FileUpdate(
        memory,
        chunk_numel=chunk,
        tensors=tensors,
        sets=sets,
        reads_ahead=section.pipeline_read,
        writes_behind=section.pipeline_write,
        pin=pin,
        up=up,
    )
    return memory, strategy
