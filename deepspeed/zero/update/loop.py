"""The loop of the update: one pass over chunks of masters, wherever they live.

A *chunk* is a contiguous part of one master that is updated at once: the whole master on the device, a bounded part
where it must be sent. A :class:`UpdateStrategy` implements one tier: it brings the operands of a chunk to where the
kernel runs and takes the results back. The loop is the same for all tiers::

    fetch chunk i (its transfer began earlier) -> update it -> start to store it -> publish a bucket that is complete
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepspeed.ops.elementwise import flat_updater
from deepspeed.ops.flat import FlatUpdate
from deepspeed.ops.rounding import ElementRounding
from deepspeed.zero.gradient.gradient_bucket import GradientBucket
from deepspeed.zero.placement import Tier
from deepspeed.zero.ranges import range_of
from deepspeed.zero.update.masters import MasterBucket


@dataclass
class UpdateSlice:
    """A contiguous part of one master."""

    master: MasterBucket
    gradients: GradientBucket
    used: list[bool]  # per tile, whether it got a gradient on any rank
    start: int  # first element in the master; a multiple of 64
    stop: int  # one past the last element

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass
class Operands:
    """Holds the operands of the kernel: 1-D tensors as long as the chunk, all on one device."""

    master: torch.Tensor  # updated in place
    grad: torch.Tensor  # read
    # per-element states, updated in place; None: those that lie in the optimizer's ``state``
    states: dict[str, torch.Tensor] | None
    out: torch.Tensor | None  # receives the new compute parameters, or None where ``master`` is the compute tensor


class PendingCopy(Protocol):
    """A copy in flight between host and device."""

    def wait_on_host(self) -> None:
        """Blocks the host until it is over."""


class UpdateStrategy:
    """Updates masters in place: the strategy of the device tier, and base class of the others."""

    chunk_numel: int | None = None
    """Most elements of a chunk; None: a whole master."""

    def begin(self, chunks: Sequence[UpdateSlice]) -> None:
        """Announces the chunks of one update, in the order in which they will be fetched."""

    def fetch(self, chunk: UpdateSlice) -> Operands:
        """Returns the operands of the next chunk, ready to be worked on."""
        grad = chunk.gradients.result
        assert grad is not None, f"{chunk.master.bucket!r} has no gradient although one was counted"
        part = slice(chunk.start, chunk.stop)
        return Operands(chunk.master.flat[part], grad[part], None, self._out(chunk))

    def _out(self, chunk: UpdateSlice) -> torch.Tensor | None:
        """Returns where the kernel writes compute parameters: in place if it can reach them, else a staging tensor."""
        master = chunk.master
        if master.out is None:
            return None
        out = master.out[chunk.start : chunk.stop]
        return out if master.writes_out_in_place else torch.empty_like(out, device=master.flat.device)

    def store(self, chunk: UpdateSlice, operands: Operands, updated: Sequence[slice]) -> None:
        """Starts to copy the kernel's results from staging tensors back.

        Args:
            updated: The parts of the chunk that the kernel updated; a staging tensor of compute parameters is undefined
                elsewhere.
        """
        master = chunk.master
        if operands.out is not None and not master.writes_out_in_place:
            assert master.out is not None
            target = master.out[chunk.start : chunk.stop]
            for part in self._complete(chunk, operands, updated):
                master.bucket.memory.write(target[part], operands.out[part])

    def store_whole(self, chunk: UpdateSlice, operands: Operands, updated: Sequence[slice]) -> PendingCopy | None:
        """Starts to copy compute parameters that were computed earlier to where forwards read them.

        Returns:
            The copy that the host must wait for before it writes ``out`` again; None for nothing.
        """
        master = chunk.master
        assert master.out is not None and operands.out is not None
        for part in self._complete(chunk, operands, updated):
            if master.writes_out_in_place:
                master.out[part].copy_(operands.out[part])
            else:
                master.bucket.memory.write(master.out[part], operands.out[part])
        return None

    def _complete(self, chunk: UpdateSlice, operands: Operands, updated: Sequence[slice]) -> Sequence[slice]:
        """Returns the parts of staged compute parameters that are to be stored.

        Those that were updated; parameters without a gradient do not change. A file is written in whole pages, so there
        the other parts are computed from the master, which rounds to them.
        """
        if chunk.master.bucket.memory.tier is not Tier.FILE or not updated:
            return updated
        assert operands.out is not None
        starts = [0, *(part.stop for part in updated)]
        for start, stop in zip(starts, [*(part.start for part in updated), chunk.numel], strict=True):
            if start < stop:
                operands.out[start:stop].copy_(operands.master[start:stop])
        return [slice(0, chunk.numel)]

    def before_publish(self, master: MasterBucket) -> None:
        """Called when all chunks of ``master`` are stored and its compute tensor is about to be sent to other ranks."""

    def finish(self) -> None:
        """Waits for every transfer; also called when the update failed."""

    def close(self) -> None:
        """Blocks the host until its staging memory may be freed."""


class ChunkUpdater:
    """Runs the update of one optimizer over chunks."""

    def __init__(
        self,
        flat: FlatUpdate,
        optimizer: torch.optim.Optimizer,
        strategies: Mapping[Tier, UpdateStrategy],
        *,
        rounds: bool = False,
    ) -> None:
        self._flat = flat
        self._rounds = rounds
        self._number = 0
        self._optimizer = optimizer
        self._strategies = strategies

    def run(
        self,
        work: Sequence[tuple[MasterBucket, GradientBucket, list[bool]]],
        factor: float | None,
        publish: Callable[[MasterBucket], None],
        store: Mapping[MasterBucket, Callable[[], None]],
        number: int,
    ) -> None:
        """Updates masters.

        Args:
            store: For masters with an update computed earlier: applies it.
            number: The number of the update, equal on all ranks; decides how 16 bits are rounded.
        """
        self._number = number
        self._keep_states(work)
        by_master = [
            (master, [] if master in store else self._cut(master, gradients, used)) for master, gradients, used in work
        ]
        for tier, strategy in self._strategies.items():
            strategy.begin([chunk for master, chunks in by_master if master.tier is tier for chunk in chunks])
        try:
            for master, chunks in by_master:
                strategy = self._strategies[master.tier]
                with range_of("update", master.bucket):
                    if master in store:
                        store[master]()
                    for chunk in chunks:
                        operands = strategy.fetch(chunk)
                        strategy.store(chunk, operands, self._update(chunk, operands, factor))
                    strategy.before_publish(master)
                publish(master)
        finally:
            for strategy in self._strategies.values():
                strategy.finish()
            for master, _, _ in work:
                master.bucket.memory.settle()

    def _cut(self, master: MasterBucket, gradients: GradientBucket, used: list[bool]) -> list[UpdateSlice]:
        """Returns the chunks of a master to be updated: none if other ranks own all parameters with a gradient."""
        numel = master.flat.numel()
        step = self._strategies[master.tier].chunk_numel or numel
        intervals = [run.interval for run in master.runs if used[master.tile_intervals(run.interval)[0][0]]]
        return [
            UpdateSlice(master, gradients, used, start, min(start + step, numel))
            for start in range(0, numel, step or 1)
            if any(interval.start < start + step and start < interval.stop for interval in intervals)
        ]

    def _keep_states(self, work: Sequence[tuple[MasterBucket, GradientBucket, list[bool]]]) -> None:
        """Moves per-element states that were replaced back to the memory of their master."""
        initial: dict[tuple[int, torch.dtype], dict[str, Any]] = {}
        for master, _, used in work:
            if master.tier is Tier.DEVICE:
                continue
            for run in master.runs:
                if not used[master.tile_intervals(run.interval)[0][0]]:
                    continue
                key = (run.interval.param_group, master.flat.dtype)
                if key not in initial:
                    group = self._optimizer.param_groups[run.interval.param_group]
                    initial[key] = first_state(self._flat, group, master.flat.dtype)
                master.keep_state(run, self._optimizer.state[run.param], initial[key])

    def _update(self, chunk: UpdateSlice, operands: Operands, factor: float | None) -> list[slice]:
        optimizer = self._optimizer
        number = self._number if self._rounds else None
        return update_chunk(self._flat, optimizer.param_groups, optimizer.state, chunk, operands, factor, number)


def update_chunk(
    flat: FlatUpdate,
    groups: Sequence[dict[str, Any]],
    states: Mapping[torch.Tensor, dict[str, Any]],
    chunk: UpdateSlice,
    operands: Operands,
    factor: float | None,
    number: int | None = None,
) -> list[slice]:
    """Updates the runs (1-D) of a chunk that got gradients.

    Args:
        states: By run; changed.
        number: The number of the update, where results of 16 bit are rounded stochastically; None: to nearest.

    Returns:
        The parts of the chunk that the runs fill.
    """
    master = chunk.master
    updated: list[slice] = []
    for run in master.runs:
        interval = run.interval
        start, stop = max(interval.start, chunk.start), min(interval.stop, chunk.stop)
        if start >= stop or not chunk.used[master.tile_intervals(interval)[0][0]]:
            continue
        state = states[run.param]
        part = slice(start - chunk.start, stop - chunk.start)
        is_whole = (start, stop) == (interval.start, interval.stop) and operands.states is None
        local = state if is_whole else _state_part(state, interval.numel, start - interval.start, stop - start)
        if operands.states is not None:
            local.update((key, tensor[part]) for key, tensor in operands.states.items() if key in state)
        # Passed only if needed: a program's own optimizer may lack the argument.
        rounding = {} if number is None else {"rounding": ElementRounding(number, master.intervals(run, start, stop))}
        flat.flat_update(
            groups[interval.param_group],
            operands.master[part],
            operands.grad[part],
            local,
            grad_scale=factor,
            out=None if operands.out is None else operands.out[part],
            advance_step=start == interval.start,
            **rounding,
        )
        if local is not state and "step" in local:
            state["step"] = local["step"]  # a plain number is replaced, not changed in place
        if updated and updated[-1].stop == part.start:
            part = slice(updated.pop().start, part.stop)
        updated.append(part)
    return updated


def first_state(flat: FlatUpdate, group: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns the state that a run of ``group`` starts with, per-element states in the length of one block."""
    probe: dict[str, Any] = {}
    flat.init_flat_state(group, torch.zeros(64, dtype=dtype), probe)
    return probe


def state_itemsizes(optimizer: torch.optim.Optimizer | None) -> tuple[int, ...]:
    """Returns the bytes per element of every per-element state.

    Empty if only the optimizer's ``step`` determines them.
    """
    flat = None if optimizer is None else flat_updater(optimizer)
    if flat is None or optimizer is None:
        return ()
    sizes: dict[str, int] = {}
    for group in optimizer.param_groups:
        for key, value in first_state(flat, group).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                sizes[key] = value.element_size()
    return tuple(sizes.values())


def _state_part(state: dict[str, Any], numel: int, offset: int, length: int) -> dict[str, Any]:
    return {
        key: value[offset : offset + length]
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == numel
        else value
        for key, value in state.items()
    }
