"""Collects what this rank writes: its runs of every bucket, and the small states of the optimizer.

Along axes on which tiles are whole, one rank writes them (``BucketGroup.is_primary_replica``) and the others nothing.
Sharded states are written by their owner. Replicated ones are divided alike: each rank writes its share of each bucket
(``Bucket.share``), regardless of the placement, so that every byte is written once and all ranks write equally much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepspeed.checkpoint.format import COMPUTE, MASTER, optimizer_kind
from deepspeed.checkpoint.writer import BucketRun
from deepspeed.errors import CheckpointError
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.update.masters import MasterBucket, MasterRun

_COMPARED_NUMEL = 1 << 18  # stays in the cache


@dataclass
class RankCheckpoint:
    """This rank's part of a checkpoint, as views of live tensors."""

    runs: dict[str, list[BucketRun]] = field(default_factory=lambda: defaultdict(list))  # by kind, in bucket order
    # for each set of parameter names the optimizer states that are no per-element tensors, if no other rank has the
    # same
    scalars: list[tuple[tuple[str, ...], dict[str, Any]]] = field(default_factory=list)


def collect(
    runtime: ZeroRuntime,
    optimizer: torch.optim.Optimizer | None,
    numbers: Mapping[int, int],
    *,
    exclude_frozen: bool,
) -> RankCheckpoint:
    """Gathers references; copies nothing. ``numbers`` has the checkpoint's number of each bucket, by index."""
    found = RankCheckpoint()
    masters = {master.bucket.index: master for master in runtime.masters}
    for bucket in runtime.buckets:
        number = numbers.get(bucket.index)
        if number is None:
            continue
        master = masters.get(bucket.index)
        if master is not None:
            _collect_master(found, bucket, number, master)
            if optimizer is not None:
                for run in master.runs:
                    _collect_state(found, bucket, number, master, run, optimizer.state.get(run.param) or {})
        else:
            kept = [parameter.requires_grad or not exclude_frozen for parameter in bucket.params]
            _collect_compute(found, bucket, number, kept)
    found.runs = {kind: list(_joined(parts)) for kind, parts in found.runs.items()}
    return found


def _collect_master(found: RankCheckpoint, bucket: Bucket, number: int, master: MasterBucket) -> None:
    lower, upper = bucket.share
    base, _ = master.layout.slice_bounds(master.rank)
    flat = master.flat[lower - base : upper - base]
    if lower == upper:
        return
    found.runs[MASTER].append(BucketRun(number, lower, upper, (flat,), flat.dtype))
    if master.out is not None:
        out = master.out[lower - base : upper - base]
        if not _is_rounded(out, flat):
            found.runs[COMPUTE].append(BucketRun(number, lower, upper, (out,), out.dtype))


def _is_rounded(out: torch.Tensor, flat: torch.Tensor) -> bool:
    """Returns whether ``out`` equals ``flat`` rounded to its dtype, so that it need not be written."""
    for start in range(0, flat.numel(), _COMPARED_NUMEL):
        rounded = flat[start : start + _COMPARED_NUMEL].to(out.dtype)
        part = out[start : start + _COMPARED_NUMEL].to(rounded.device)
        # the widest dtype is fastest
        bits = torch.int64 if part.nbytes % 8 == 0 else torch.uint8
        if not torch.equal(rounded.view(bits), part.view(bits)):
            return False
    return True


def _collect_compute(found: RankCheckpoint, bucket: Bucket, number: int, kept: list[bool]) -> None:
    lower, upper = bucket.share
    values = bucket.shared_values
    if all(kept):
        intervals = [(lower, upper)] if upper > lower else []
    else:
        tiles = zip(bucket.layout.tiles, bucket.layout.starts, kept, strict=True)
        wanted = [(max(start, lower), min(start + tile.numel, upper)) for tile, start, keep in tiles if keep]
        intervals = [(first, last) for first, last in wanted if first < last]
    for first, last in intervals:
        part = values[first - lower : last - lower]
        found.runs[COMPUTE].append(BucketRun(number, first, last, (part,), part.dtype))


def _collect_state(
    found: RankCheckpoint, bucket: Bucket, number: int, master: MasterBucket, run: MasterRun, state: dict[str, Any]
) -> None:
    """Collects the optimizer state of one run: this rank's slice of per-element tensors, and the rest by name."""
    if not state:
        return
    lower, upper = bucket.share
    base, _ = master.layout.slice_bounds(master.rank)
    start = base + run.interval.start
    names = tuple(master.layout.tiles[tile].logical for tile, _, _ in master.tile_intervals(run.interval))
    scalars: dict[str, Any] = {}
    for key, value in state.items():
        if is_per_element(value, run.param):
            flat = value.detach().reshape(-1)
            first, last = max(start, lower), min(start + flat.numel(), upper)
            if first < last:
                part = flat[first - start : last - start]
                found.runs[optimizer_kind(key)].append(BucketRun(number, first, last, (part,), part.dtype))
        elif isinstance(value, torch.Tensor) and value.numel() > 1 and len(names) > 1:
            raise CheckpointError(
                f"the optimizer keeps a state {key!r} of shape {tuple(value.shape)} for {len(names)} parameters "
                f"together ({names[0]!r} ...), which belongs to none of them and cannot be saved; use an elementwise "
                "optimizer, or ZeRO stage 0"
            )
        else:
            scalars[key] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
    if master.is_sharded or bucket.group.place == 0:
        found.scalars.append((names, scalars))


def is_per_element(value: Any, param: torch.Tensor) -> bool:
    """Returns whether an optimizer's state ``value`` has the shape of the run ``param``, and at least one dimension."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape


def _joined(runs: Iterable[BucketRun]) -> Iterable[BucketRun]:
    """Joins ranges that follow each other in the same bucket and dtype."""
    last: BucketRun | None = None
    for part in runs:
        if last is not None and (last.bucket, last.stop, last.dtype) == (part.bucket, part.start, part.dtype):
            last = replace(last, stop=part.stop, values=(*last.values, *part.values))
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last
