"""Master weights and the runs that the optimizer updates.

For each trainable bucket the owner keeps one flat master: an fp32 copy of its slice, or, where the compute dtype is
already fp32 or masters of 16 bit are requested, the compute shard itself. The optimizer sees the master as 1-D runs,
one per run of equal param group. A run is cut on demand where only some of its parameters got gradients: torch
skips a parameter without gradient (no weight decay, no momentum, no step count), so a flat update must skip it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepspeed.comm.job.axis import Axis
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.transports.transport import Transport, Work
from deepspeed.errors import require_state
from deepspeed.ops.fragments import CutTensors, FragmentTable, SharedTensor, TensorFragment
from deepspeed.ops.rounding import ParameterInterval
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import Memory, MemoryTracker, StorageKind
from deepspeed.zero.tiling.layout import BucketLayout, Fragment, Run

_PART_NUMEL = 1 << 22  # elements of a master that are compared with its compute values at once


@dataclass(eq=False)  # compared by identity: comparing the tensors would fail
class MasterRun:
    """One run of a master as the optimizer sees it."""

    # 1-D view of the master (in the shape of its one parameter if the optimizer needs shapes)
    param: torch.nn.Parameter
    interval: Run  # where it lies in the master


class MasterBucket:
    """This rank's part of the master weights of one bucket.

    Args:
        original: 1-D, the values from before the cast to the compute dtype: of the whole bucket, or of this rank's
            slice of it.
        is_narrow: ``flat`` has the compute dtype, also where that has 16 bit; otherwise it is at least fp32.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        is_sharded: bool,
        original: torch.Tensor,
        memory_tracker: MemoryTracker,
        whole_tensors: bool,
        memory: Memory,
        is_narrow: bool = False,
    ) -> None:
        self.bucket = bucket
        self.whole_tensors = whole_tensors  # whether each run is one parameter in its shape
        self.memory = memory  # where ``flat`` and the optimizer state are
        self.state_tier = memory.tier  # where the optimizer state is at the moment
        self._memory_tracker = memory_tracker
        self.transport: Transport = bucket.group.owners  # of the ranks that share it, numbered as ``layout`` is cut
        self.layout: BucketLayout = replace(bucket.layout, num_slices=self.transport.size if is_sharded else 1)
        self.rank = self.transport.rank if is_sharded else 0
        compute = self._compute()
        # ``flat`` is the 1-D master; ``out`` the compute tensor that must receive the update, None where it is ``flat``
        dtype = bucket.dtype if is_narrow else torch.promote_types(bucket.dtype, torch.float32)
        if bucket.dtype == dtype and self._can_share():
            self.flat, self.out = compute, None
        else:
            lower, upper = self.layout.slice_bounds(self.rank)
            memory_tracker.add(StorageKind.MASTER, self.tier, (upper - lower) * dtype.itemsize)
            self.flat = memory.empty(upper - lower, dtype, f"the master weights of {bucket.label}")
            memory_tracker.claim(self.flat)
            base = 0 if original.numel() == self.layout.numel else bucket.layout.slice_bounds(bucket.transport.rank)[0]
            memory.write(self.flat, original[lower - base : upper - base])
            memory.settle()
            self.out = compute
        # off the device: per-element states of the whole master; those of the runs are views of them
        self.states: dict[str, torch.Tensor] = {}
        self._tile_intervals: dict[Run, list[tuple[int, int, int]]] = {}
        self.fragments: tuple[Fragment, ...] = self.layout.fragments(self.rank)
        runs = self._runs_of_tensors() if whole_tensors else list(self.layout.runs(self.rank))
        # in order of their start; together they cover every parameter that has a param group
        self.runs = [self._run(run, whole_tensors) for run in runs]

    @property
    def is_sharded(self) -> bool:
        """Returns whether other ranks own other parts."""
        return self.layout.num_slices > 1

    @property
    def counts(self) -> bool:
        """Returns whether this rank's part counts for all copies of it: each element counts once over all ranks."""
        group = self.bucket.group
        if not self.is_sharded:
            return group.is_primary_replica and group.place == 0
        return group.is_primary_replica and (group.is_spread or group.combine is None or group.combine.rank == 0)

    @property
    def tier(self) -> Tier:
        """The memory of master and optimizer state."""
        return self.memory.tier

    def _can_share(self) -> bool:
        """Returns whether the compute tensor may be the master: the same kind of memory, and not a file."""
        near, far = self.memory, self.bucket.memory
        return Tier.FILE not in (near.tier, far.tier) and near.tensor_device == far.tensor_device

    @property
    def writes_out_in_place(self) -> bool:
        """Returns whether a kernel that works on ``flat`` can write the compute tensor itself."""
        return self.out is None or (
            self.bucket.memory.tensor_device == self.memory.tensor_device and self.bucket.memory.tier is not Tier.FILE
        )

    def state_tensor(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns one per-element state of the whole master, in the master's tier; made at the first call."""
        if key not in self.states:
            numel = self.flat.numel()
            self.states[key] = self.memory.empty(numel, dtype, f"the state {key} of {self.bucket.label}")
        return self.states[key]

    def keep_state(self, run: MasterRun, state: dict[str, Any], initial: dict[str, Any]) -> None:
        """Moves the per-element state of a run into the master's memory; creates missing states.

        Args:
            state: The state of the run, in the optimizer; changed.
            initial: What a new run starts with, see ``update.loop.first_state``.
        """
        for key, first in initial.items():
            present = state.get(key)
            if not isinstance(first, torch.Tensor) or first.dim() == 0:
                if present is None:
                    state[key] = first.clone() if isinstance(first, torch.Tensor) else first
                continue
            place = self.state_tensor(key, first.dtype if present is None else present.dtype)
            place = place[run.interval.start : run.interval.stop]
            if present is None:
                self.memory.initialize(place, float(first[0]))
            elif present.data_ptr() == place.data_ptr():
                continue
            else:
                place.copy_(present)
            state[key] = place

    def _run(self, interval: Run, whole_tensor: bool = False) -> MasterRun:
        view = self.flat[interval.start : interval.stop]
        if whole_tensor:
            tile = self.layout.tiles[self.tile_intervals(interval)[0][0]]
            view = view[: tile.numel].view(tile.shape)
        return MasterRun(torch.nn.Parameter(view), interval)

    def _runs_of_tensors(self) -> list[Run]:
        ends = (*self.layout.starts[1:], self.layout.numel)
        return [
            Run(tile.param_group, start, end)
            for tile, start, end in zip(self.layout.tiles, self.layout.starts, ends, strict=True)
            if tile.param_group >= 0 and tile.numel
        ]

    def tile_intervals(self, run: Run) -> list[tuple[int, int, int]]:
        """Returns ``(tile, start, stop)`` for each tile inside ``run``, padding included, in elements of the master."""
        if run not in self._tile_intervals:
            self._tile_intervals[run] = self._find_tile_intervals(run)
        return self._tile_intervals[run]

    def _find_tile_intervals(self, run: Run) -> list[tuple[int, int, int]]:
        lower, _ = self.layout.slice_bounds(self.rank)
        ends = (*self.layout.starts[1:], self.layout.numel)
        found = []
        for index, (start, end) in enumerate(zip(self.layout.starts, ends, strict=True)):
            first, last = max(start - lower, run.start), min(end - lower, run.stop)
            if first < last and self.layout.tiles[index].numel:
                found.append((index, first, last))
        return found

    def intervals(self, run: MasterRun, start: int, stop: int) -> list[ParameterInterval]:
        """Returns which parameters lie where in elements ``[start, stop)`` of the master, all of them in ``run``."""
        lower, _ = self.layout.slice_bounds(self.rank)
        found = []
        for tile, first, last in self.tile_intervals(run.interval):
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                place = begin + lower - self.layout.starts[tile]
                found.append(ParameterInterval(self.layout.tiles[tile].logical, place, begin - start, end - begin))
        return found

    def split(self, run: MasterRun, labels: Sequence[Any]) -> list[MasterRun]:
        """Splits ``run`` into parts whose parameters have equal labels; returns the new runs.

        Args:
            run: One of ``runs``; it is replaced by the result.
            labels: Per tile of the bucket, anything with ``==``: whether it got a gradient, its step count, ...
        """
        ranges: list[tuple[Any, int, int]] = []
        for tile, start, stop in self.tile_intervals(run.interval):
            if ranges and ranges[-1][0] == labels[tile]:
                ranges[-1] = (labels[tile], ranges[-1][1], stop)
            else:
                ranges.append((labels[tile], start, stop))
        if len(ranges) <= 1:
            return [run]
        cut = [self._run(Run(run.interval.param_group, start, stop)) for _, start, stop in ranges]
        position = self.runs.index(run)
        self.runs[position : position + 1] = cut
        return cut

    def refresh(self, tile: int) -> None:
        """Copies a user's write to a resident parameter into the master."""
        self.adopt(tile, self.bucket.params[tile].detach().reshape(-1))

    def adopt(self, tile: int, values: torch.Tensor, offset: int = 0) -> None:
        """Copies those compute values of one parameter into the master that have changed.

        An element whose master already rounds to its compute value keeps the more precise master value.

        Args:
            values: 1-D, elements ``[offset, offset + len)`` of the flattened parameter, in the compute dtype; what this
                rank does not own is skipped.
        """
        fragment = self.fragment(tile)
        if self.out is None or fragment is None:
            return
        first, last = max(fragment.tile_start, offset), min(fragment.tile_stop, offset + values.numel())
        if first >= last:
            return
        start = fragment.slice_start + first - fragment.tile_start
        mine = self.flat[start : start + last - first]
        _take_changed(mine, values[first - offset : last - offset])

    def fragment(self, tile: int) -> Fragment | None:
        """Returns what this rank owns of the master of one parameter, or None."""
        return self.layout.fragment(tile, self.rank)

    def whole_tile(self, tile: int) -> torch.Tensor:
        """Returns the master of one parameter in its shape, as a view; only where masters are not cut over ranks."""
        require_state(self.layout.num_slices == 1, self.bucket, "a master that is not cut over ranks")
        start, described = self.layout.starts[tile], self.layout.tiles[tile]
        return self.flat[start : start + described.numel].view(described.shape)

    def adopt_all(self) -> None:
        """Copies the compute values of this rank's slice that have changed into the master, as :meth:`adopt` does."""
        if self.out is None:
            return
        for start in range(0, self.flat.numel(), _PART_NUMEL):
            part = slice(start, start + _PART_NUMEL)
            _take_changed(self.flat[part], self.out[part])

    def refresh_all(self) -> None:
        """Reads the whole master again from the compute parameters."""
        if self.out is not None:
            self.flat.copy_(self.out)

    def publish(self) -> None:
        """Writes the master into the compute tensor."""
        if self.out is not None:
            self.bucket.memory.await_reads()
            self.out.copy_(self.flat)

    def relocate(self, copy: Callable[[torch.Tensor], torch.Tensor] | None, tier: Tier) -> None:
        """Moves the master, 1-D, to other memory, or follows the compute tensor that has moved."""
        compute = self._compute()
        if self.out is None:
            self.flat = compute
        else:
            self.out = compute
            if copy is not None:
                nbytes = self.flat.numel() * self.flat.element_size()
                self._memory_tracker.add(StorageKind.MASTER, Tier.DEVICE if tier is Tier.HOST else Tier.HOST, -nbytes)
                self._memory_tracker.add(StorageKind.MASTER, tier, nbytes)
                self.flat = copy(self.flat)
        for run in self.runs:
            run.param.data = self.flat[run.interval.start :][: run.param.numel()].view(run.param.shape)

    def _compute(self) -> torch.Tensor:
        """Returns the compute tensor that belongs to this master."""
        bucket = self.bucket
        if bucket.group.is_spread and bucket.group.combine is not None and self.is_sharded:
            return bucket.group.combine.my_slice(bucket.shard)
        return bucket.shard if self.is_sharded or bucket.is_sharded else bucket.full.tensor

    def first_non_finite(self, gradient: torch.Tensor) -> int | None:
        """Returns the index of the first tile whose part of ``gradient`` is not finite, or None.

        Args:
            gradient: 1-D, aligned with the master.
        """
        for fragment in self.fragments:
            if not bool(torch.isfinite(gradient[fragment.in_slice]).all()):
                return fragment.tile
        return None


def _take_changed(master: torch.Tensor, values: torch.Tensor) -> None:
    """Copies those compute values into a part of a master, 1-D and as long, to which its elements do not round."""
    new = values.to(master.device)
    master.copy_(torch.where(new == master.to(new.dtype), master, new.to(master.dtype)))


class PublishWork:
    """The transfers of changed masters to all ranks that have their parameters."""

    def __init__(self, masters: Sequence[MasterBucket]) -> None:
        self._masters = masters
        self._works: list[Work] = []

    def start(self, master: MasterBucket) -> None:
        """Sends what this rank owns of a master whose compute tensor is written, unless every rank has all of it."""
        if master.is_sharded and (work := master.bucket.start_publish()) is not None:
            self._works.append(work)

    def wait(self) -> None:
        """Waits for the started transfers; later writes to the parameters are detected."""
        for work in self._works:
            work.wait()
        for master in self._masters:
            master.bucket.remember_values()


def split_state(state: dict[str, Any], old: MasterRun, new: MasterRun) -> dict[str, Any]:
    """Returns the optimizer state of ``new``, a part of ``old``: views of per-element tensors, copies of the rest."""
    return cut_state(state, old.interval.numel, new.interval.start - old.interval.start, new.interval.numel)


def cut_state(state: dict[str, Any], of: int, offset: int, numel: int) -> dict[str, Any]:
    """Returns the optimizer state of ``numel`` elements from ``offset`` on of a run of ``of`` elements.

    Per-element tensors are views, the rest are copies.
    """
    made: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == of:
            made[key] = value[offset : offset + numel]
        else:
            made[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return made


def fragment_tables(masters: list[MasterBucket], other_parts: Axis | None = None) -> list[FragmentTable]:
    """Returns which parts of which parameters every run holds, for optimizers that need whole-tensor information.

    Returns:
        A table for the masters that are cut over the same ranks, in the same order on all ranks: usually one, and
        further ones for parameters in groups of their own, such as experts.
    """
    together: dict[int | None, list[MasterBucket]] = {}
    for master in masters:
        together.setdefault(id(master.transport) if master.is_sharded else None, []).append(master)
    return [_fragment_table(members, other_parts) for members in together.values() or [[]]]


def _fragment_table(masters: list[MasterBucket], other_parts: Axis | None) -> FragmentTable:
    """Returns the table of masters that are cut over the same ranks."""
    by_param: dict[int, tuple[TensorFragment, ...]] = {}
    shared: list[SharedTensor] = []
    first = 0
    for master in masters:
        for run in master.runs:
            by_param[id(run.param)] = tuple(_fragments(master, run, first))
        layout = master.layout
        bounds = range(0, layout.numel + 1, max(layout.slice_numel, 1))
        for number, (tile, start) in enumerate(zip(layout.tiles, layout.starts, strict=True), first):
            if tile.param_group >= 0 and tile.numel:
                shared.append(SharedTensor(tile.name, number, tile.shape, tile.param_group, start, bounds))
        first += len(layout.tiles)
    parts = None if other_parts is None else _cut_tensors(masters, other_parts)
    if not masters or not masters[0].is_sharded:
        return FragmentTable(by_param, first, None, tuple(shared), cut=parts)
    transport, owners = masters[0].transport, masters[0].bucket.group
    along = owners.owners if owners.is_spread else owners.reduce
    ranks = tuple(transport.rank_at(position) for position in range(transport.size))
    in_job = tuple(transport.ranks[rank] for rank in ranks) if transport.ranks else ()
    axis = None if along.group is None else axis_of(along.group, along.axis)
    return FragmentTable(by_param, first, axis, tuple(shared), ranks, transport.rank, parts, in_job)


def _cut_tensors(masters: list[MasterBucket], other_parts: Axis) -> CutTensors | None:
    """Returns the trained tensors of buckets whose ranks have parts, in the order of their names."""
    found: dict[str, tuple[int, bool]] = {}
    first = 0
    for master in masters:
        of_bucket = master.bucket.group
        for number, tile in enumerate(master.layout.tiles):
            if of_bucket.is_part and tile.param_group >= 0:
                found[tile.name] = first + number, of_bucket.is_primary_replica
        first += len(master.layout.tiles)
    if not found:
        return None
    columns, counts = zip(*(found[name] for name in sorted(found)), strict=True)
    return CutTensors(other_parts, columns, counts)


def _fragments(master: MasterBucket, run: MasterRun, first: int) -> Iterator[TensorFragment]:
    """Returns the fragments of a run; ``first`` is the number of the bucket's first tensor."""
    for fragment in master.fragments:
        start = fragment.slice_start - run.interval.start
        if 0 <= start < run.interval.numel:
            tile = master.layout.tiles[fragment.tile]
            index, stop = first + fragment.tile, start + fragment.numel
            yield TensorFragment(tile.name, index, start, stop, fragment.tile_start, tile.shape)


def group_indices(optimizer: torch.optim.Optimizer | None) -> dict[int, int]:
    """Maps ``id(parameter)`` to the index of its param group."""
    if optimizer is None:
        return {}
    return {
        id(parameter): number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
    }


def move_to_runs(optimizer: torch.optim.Optimizer, masters: list[MasterBucket]) -> None:
    """Replaces the parameters in the optimizer's groups by this rank's runs (1-D), and cuts existing state alike.

    The optimizer and its group dicts stay the same objects, so that schedulers built on them keep working; only the
    ``params`` lists are replaced.
    """
    parameters = [parameter for master in masters for parameter in master.bucket.params]
    states = {id(parameter): optimizer.state.pop(parameter, None) for parameter in parameters}
    for group in optimizer.param_groups:
        group["params"] = []
    for master in masters:
        counters = [_scalar_state(states[id(parameter)]) for parameter in master.bucket.params]
        for run in list(master.runs):
            master.split(run, counters)
        for run in master.runs:
            optimizer.param_groups[run.interval.param_group]["params"].append(run.param)
            state = _cut_state(master, run, states, master.whole_tensors)
            if state:
                optimizer.state[run.param] = state


def _scalar_state(state: dict[str, Any] | None) -> tuple[tuple[str, float], ...] | None:
    """Returns the scalar state that parameters of one run must share: step counts and the like, or no state yet."""
    if not state:
        return None
    return tuple(
        (key, float(value)) for key, value in sorted(state.items()) if key == "step" or isinstance(value, (int, float))
    )


def _cut_state(master: MasterBucket, run: MasterRun, states: dict[int, Any], whole_tensors: bool) -> dict[str, Any]:
    """Returns the state of a run, put together from the state of the parameters it holds."""
    made: dict[str, Any] = {}
    for fragment in master.fragments:
        if not run.interval.start <= fragment.slice_start < run.interval.stop:
            continue
        parameter = master.bucket.params[fragment.tile]
        tile = master.layout.tiles[fragment.tile]
        for key, value in (states.get(id(parameter)) or {}).items():
            if isinstance(value, torch.Tensor) and tuple(value.shape) == tile.shape and key != "step":
                if whole_tensors:
                    made[key] = value.to(run.param.device)
                    continue
                whole = made.setdefault(
                    key, torch.zeros(run.interval.numel, dtype=value.dtype, device=run.param.device)
                )
                part = value.reshape(-1)[fragment.tile_start : fragment.tile_start + fragment.numel]
                offset = fragment.slice_start - run.interval.start
                whole[offset : offset + fragment.numel].copy_(part)
            else:
                made.setdefault(key, value.clone() if isinstance(value, torch.Tensor) else value)
    return made
