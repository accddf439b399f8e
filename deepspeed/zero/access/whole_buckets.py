"""Whole buckets of parameters, masters, gradients or optimizer states: one collective for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.bucket import Bucket, State
from deepspeed.zero.calls import compare_calls
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.tiling.assemble import assemble
from deepspeed.zero.tiling.layout import BucketLayout
from deepspeed.zero.tiling.parts import part_owners_of
from deepspeed.zero.tiling.tiles import Tile
from deepspeed.zero.untouched import untouched
from deepspeed.zero.update.masters import MasterBucket

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
"""Dtypes of states by the number that ranks exchange."""


@dataclass(frozen=True)
class Source:
    """This rank's part of one quantity of a bucket."""

    flat: torch.Tensor  # 1-D, aligned with this rank's slice of ``layout``
    layout: BucketLayout  # how the quantity is cut; ``num_slices`` 1 where every rank has all of it
    transport: Transport  # the transport of the ranks that share it
    label: str  # for messages
    device: torch.device  # where the whole is put together: that of the transport, as ``flat`` may be offloaded

    def read(self, tiles: Sequence[int], *, borrow: bool = False) -> dict[int, torch.Tensor]:
        """Returns whole tensors in their shapes, by tile. Every rank must call it with the same tiles.

        All tiles of the bucket cost one all-gather, some of them one round of sends.

        Args:
            borrow: Return views where this rank has the whole; the result must not be changed.
        """
        layout = self.layout
        if layout.num_slices == 1:
            return {tile: self._cut(self.flat, tile).to(self.device, copy=not borrow) for tile in tiles}
        if len(tiles) == len(layout.tiles):
            whole = torch.empty(layout.numel, dtype=self.flat.dtype, device=self.device)
            self.transport.my_slice(whole).copy_(self.flat)
            self.transport.all_gather(whole, key=self.transport.next_move(), label=self.label).wait()
            return {tile: self._cut(whole, tile) for tile in tiles}
        return self._read_some(tiles)

    def _cut(self, whole: torch.Tensor, tile: int) -> torch.Tensor:
        start, described = self.layout.starts[tile], self.layout.tiles[tile]
        return whole[start : start + described.numel].view(described.shape)

    def _read_some(self, tiles: Sequence[int]) -> dict[int, torch.Tensor]:
        found, transfers, rank = {}, [], self.transport.rank
        for tile in tiles:
            described, fragment = self.layout.tiles[tile], self.layout.fragment(tile, rank)
            flat = torch.empty(described.numel, dtype=self.flat.dtype, device=self.device)
            mine = None if fragment is None else self.flat[fragment.in_slice]
            transfers += assemble(self.layout, tile, rank, mine, flat)
            found[tile] = flat.view(described.shape)
        self.transport.move(transfers, label=self.label)
        return found


def bucket_source(runtime: ZeroRuntime, bucket: Bucket, kind: str, dtype: torch.dtype | None = None) -> Source | None:
    """Returns this rank's part of one quantity of a bucket, or None where the bucket has none on any rank."""
    label = f"{kind} of {bucket.label}"
    master = runtime.master_of(bucket)
    if kind == "param" or (kind == "fp32" and master is None):
        flat, layout = (
            (bucket.shard, bucket.layout) if bucket.is_sharded else (bucket.full.tensor, _whole(bucket.layout))
        )
        wanted = torch.float32 if kind == "fp32" and flat.is_floating_point() else flat.dtype
        return Source(flat.to(wanted), layout, bucket.transport, label, bucket.device)
    if master is None:
        return None
    if kind == "fp32":
        wide = master.flat.to(torch.promote_types(master.flat.dtype, torch.float32))
        return Source(wide, master.layout, master.transport, label, bucket.device)
    if kind == "grad":
        gradients = runtime.gradients_of(bucket)
        result = None if gradients is None else gradients.result
        return None if result is None else Source(result, master.layout, master.transport, label, bucket.device)
    flat = _states(runtime, master, kind, dtype or torch.float32)
    return Source(flat, master.layout, master.transport, label, bucket.device)


def _whole(layout: BucketLayout) -> BucketLayout:
    return replace(layout, num_slices=1)


def _states(runtime: ZeroRuntime, master: MasterBucket, key: str, dtype: torch.dtype) -> torch.Tensor:
    flat = torch.zeros(master.flat.numel(), dtype=dtype, device=master.flat.device)
    assert runtime.updater is not None, "there are states"
    for run in master.runs:
        value = runtime.updater.optimizer.state.get(run.param, {}).get(key)
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            flat[run.interval.start : run.interval.start + value.numel()].copy_(value.view(-1))
    return flat


def iter_full(runtime: ZeroRuntime, kind: str, bucket_bytes: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields ``(name, values)`` of a quantity in full, see ``DeepSpeedEngine.iter_full``.

    If tensor-parallel ranks cut layers unevenly, their buckets differ. So with cut layers, values are buffered and
    yielded in the order of the model; otherwise each is yielded as soon as it has been read.
    """
    present = _held(runtime, kind)
    owners = {name: part_owners_of(parameter) for parameter, name in runtime.param_names.items()}
    if all(others is None for others in owners.values()):
        for tile, value in _walk(runtime, kind, present, bucket_bytes):
            yield tile.name, value
        return
    names = {bucket.layout.tiles[tile].name for bucket, held in present for tile in held.tiles}
    to_come = deque(name for name in runtime.param_names.values() if name in names)
    waiting: dict[str, torch.Tensor] = {}
    for tile, found in _walk(runtime, kind, present, bucket_bytes):
        waiting[tile.name] = found
        while to_come and to_come[0] in waiting:
            name = to_come.popleft()
            value, others = waiting.pop(name), owners[name]
            yield name, value if others is None else others.whole(value, f"{kind} of {name}")


def walk_full(
    runtime: ZeroRuntime, bucket_bytes: int | None, left_out: Collection[str]
) -> Iterator[tuple[Tile, torch.Tensor]]:
    """Yields the parameters of every tile in full, bucket by bucket. Every rank must go through all of it.

    The caller changes no tensor and keeps none: where this rank has the whole, it gets views.

    Args:
        bucket_bytes: Most bytes gathered at once; a larger bucket is read in parts. None: a bucket at a time.
        left_out: Names of parameters to pass over, the same on all ranks.

    Yields:
        ``(tile, values in the shape of the tile)``.
    """
    yield from _walk(runtime, "param", _held(runtime, "param"), bucket_bytes, left_out=left_out, borrow=True)


class _TileInfo(NamedTuple):
    """The tiles of a bucket that have a quantity on some rank, and the dtype of the quantity."""

    tiles: set[int]
    dtype: torch.dtype


def _held(runtime: ZeroRuntime, kind: str) -> list[tuple[Bucket, _TileInfo]]:
    """Returns every bucket with the tiles that have a quantity; the same on all ranks that share the buckets."""
    if not runtime.buckets:
        return []
    runtime.leave_backward("iter_full")
    if kind == "fp32" and runtime.updater is not None:
        runtime.updater.carry_user_writes()
    with untouched():
        return list(zip(runtime.buckets, _agree_on_contents(runtime, kind), strict=True))


def _walk(
    runtime: ZeroRuntime,
    kind: str,
    present: list[tuple[Bucket, _TileInfo]],
    bucket_bytes: int | None,
    *,
    left_out: Collection[str] = (),
    borrow: bool = False,
) -> Iterator[tuple[Tile, torch.Tensor]]:
    """Walks the buckets for :func:`walk_full`; ``present`` is the result of :func:`_held`."""
    scale = 1.0
    if kind == "grad" and runtime.updater is not None:
        scale = runtime.updater.loss_scale
    for bucket, held in present:
        tiles = {tile for tile in held.tiles if bucket.layout.tiles[tile].name not in left_out}
        for window in tile_windows(bucket.layout, tiles, held.dtype.itemsize, bucket_bytes):
            with untouched(), torch.no_grad():
                source = bucket_source(runtime, bucket, kind, held.dtype)
                assert source is not None
                found = source.read(window, borrow=borrow)
            for tile in window:
                value = found.pop(tile)
                if kind == "grad":  # without the loss scale it could be too small for fp16
                    value = value.to(torch.promote_types(value.dtype, torch.float32))
                if tile in tiles:
                    yield bucket.layout.tiles[tile], value if scale == 1.0 else value.div_(scale)
                del value
            del found, source  # before the next window is gathered


def publish(runtime: ZeroRuntime) -> None:
    """Sends every rank's changed slices to the ranks that keep parameters whole. Every rank must call it."""
    for bucket in runtime.buckets:
        work = bucket.start_publish()
        if work is not None:
            work.wait()
        bucket.remember_values()


@contextmanager
def full_parameters(runtime: ZeroRuntime) -> Iterator[None]:
    """Gathers every parameter inside the block and keeps what was written there. Every rank must enter it.

    The whole model must fit on the device.
    """
    sharded = [bucket for bucket in runtime.buckets if bucket.state is State.SHARDED]
    for bucket in sharded:
        bucket.start_gather(exactly=True)
        bucket.finish_gather()
    try:
        yield
    finally:
        for bucket in sharded:
            bucket.store_shard()
            bucket.reshard()


def tile_windows(layout: BucketLayout, tiles: set[int], itemsize: int, limit: int | None) -> Iterator[list[int]]:
    """Yields groups of neighboring tiles of at most ``limit`` bytes: the whole bucket if it fits.

    Args:
        limit: Most bytes of a group; a larger tile is a group of its own. None: the whole bucket.
    """
    if not tiles:
        return
    everything = list(range(len(layout.tiles)))
    if limit is None or layout.numel * itemsize <= limit:
        yield everything
        return
    window: list[int] = []
    nbytes = 0
    for tile in everything:
        if tile not in tiles:
            continue
        size = layout.tiles[tile].numel * itemsize
        if window and nbytes + size > limit:
            yield window
            window, nbytes = [], 0
        window.append(tile)
        nbytes += size
    if window:
        yield window


def _agree_on_contents(runtime: ZeroRuntime, kind: str) -> list[_TileInfo]:
    """Returns, per bucket, which tiles have the quantity on some rank, and its dtype; one exchange for all buckets."""
    mine: list[int] = []
    for bucket in runtime.buckets:
        mine += _contents(runtime, bucket, kind)
    rows = compare_calls(runtime.buckets[0].transport, f"iter_full({kind!r})", mine)
    merged = [max(column) for column in zip(*rows, strict=True)]
    found, position = [], 0
    for bucket in runtime.buckets:
        count = len(bucket.layout.tiles)
        code, flags = merged[position], merged[position + 1 : position + 1 + count]
        position += 1 + count
        if code > len(DTYPES):
            raise DeepSpeedConfigError(
                f"iter_full({kind!r}): the optimizer has states, but no per-element one of that name; kinds are "
                "'param', 'fp32', 'grad', and names of states such as 'exp_avg'"
            )
        tiles = {tile for tile, flag in enumerate(flags) if flag}
        found.append(_TileInfo(tiles if code else set(), DTYPES[code - 1] if code else torch.float32))
    return found


def _contents(runtime: ZeroRuntime, bucket: Bucket, kind: str) -> list[int]:
    """Returns ``[number of the dtype + 1 or 0, flag per tile]`` of one bucket on this rank."""
    everything = [1] * len(bucket.layout.tiles)
    nothing = [0] * len(bucket.layout.tiles)
    if kind in ("param", "fp32"):
        dtype = bucket.dtype if kind == "param" or not bucket.dtype.is_floating_point else torch.float32
        return [1 + _number(dtype), *everything]
    gradients, master = runtime.gradients_of(bucket), runtime.master_of(bucket)
    if gradients is None or master is None or runtime.updater is None:
        return [0, *nothing]
    if kind == "grad":
        if gradients.result is None:
            return [0, *nothing]
        return [1 + _number(gradients.result.dtype), *(int(flag) for flag in gradients.used)]
    code, flags = 0, list(nothing)
    for run in master.runs:
        states = runtime.updater.optimizer.state.get(run.param, {})
        value = states.get(kind)
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            code = max(code, 1 + _number(value.dtype))
            for tile, _, _ in master.tile_intervals(run.interval):
                flags[tile] = 1
        elif states:
            code = len(DTYPES) + 1
    return [code, *flags]


def _number(dtype: torch.dtype) -> int:
    """Returns the index of a dtype in ``DTYPES``; dtypes that are not in it all map to 0."""
    return DTYPES.index(dtype) if dtype in DTYPES else 0
