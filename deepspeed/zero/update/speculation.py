"""Speculative updates: the host updates a master while later gradients arrive, before the global norm is known.

A worker thread computes each update with the factor that gradients get where nothing is clipped. It writes into a
second set of master, optimizer states and compute parameters (:class:`ShadowMaster`), so nothing that a program can
read changes. When the ranks have exchanged the norm, :meth:`SpeculativeUpdater.settle` keeps the updates whose inputs
were the right ones: the two sets change places. Everything else is discarded, and the update is made as without
speculation. Both ways give the same bits.

Speculation followed by validation is the idea of SuperOffload, https://arxiv.org/abs/2509.21271.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from deepspeed.logging import log_dist
from deepspeed.ops.flat import FlatUpdate, default_chunk_numel
from deepspeed.zero.gradient.gradient_bucket import GradientBucket
from deepspeed.zero.gradient.gradient_sum import gradient_factor
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import MemoryTracker, StorageKind
from deepspeed.zero.update.loop import Operands, PendingCopy, UpdateSlice, UpdateStrategy, first_state, update_chunk
from deepspeed.zero.update.masters import MasterBucket, MasterRun

_LONGEST_PAUSE = 64  # updates without speculation after several in a row that were wrong


class HostWorker:
    """Runs jobs one after another in a thread of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="deepspeed-update")

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Queues a job."""
        return self._pool.submit(job)

    def close(self) -> None:
        """Waits for the job that runs, drops the others and ends the thread. May be called twice."""
        self._pool.shutdown(cancel_futures=True)


class InlineWorker(HostWorker):
    """Runs each job immediately in the caller's thread, for the simulated device."""

    def __init__(self) -> None:
        pass

    @override
    def submit(self, job: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        try:
            job()
        except Exception as error:  # as with a thread, result() raises the error
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    @override
    def close(self) -> None:
        pass


class IdleWorker(InlineWorker):
    """Runs nothing, like a thread that is never scheduled, for the planner, which counts the memory."""

    @override
    def submit(self, job: Callable[[], None]) -> Future[None]:
        return Future()


_worker_factory: ContextVar[Callable[[], HostWorker]] = ContextVar("worker_factory", default=HostWorker)


@contextlib.contextmanager
def workers_from(make: Callable[[], HostWorker]) -> Iterator[None]:
    """Lets engines that this thread makes inside the context get their worker from ``make``."""
    token = _worker_factory.set(make)
    try:
        yield
    finally:
        _worker_factory.reset(token)


class ShadowMaster:
    """The second set of one bucket's master and optimizer states, and host memory for its new compute parameters."""

    def __init__(self, master: MasterBucket, states: Mapping[str, torch.dtype], memory_tracker: MemoryTracker) -> None:
        self.master = master  # the first set
        self._memory_tracker = memory_tracker
        self.nbytes = 0
        self.flat = self._empty(master.flat.dtype, "the second set of master weights")  # 1-D, as ``master.flat``
        # per-element states by name, 1-D, as ``master.states``
        self.states = {key: self._empty(dtype, f"the second set of the state {key}") for key, dtype in states.items()}
        # 1-D, in the compute dtype; None where ``master.flat`` is the compute tensor
        self.out = None if master.out is None else self._empty(master.out.dtype, "the new parameters")
        self.copy: PendingCopy | None = None  # the copy of ``out`` to the compute tensor

    def _empty(self, dtype: torch.dtype, what: str) -> torch.Tensor:
        numel = self.master.flat.numel()
        self._memory_tracker.add(StorageKind.SHADOW, Tier.HOST, numel * dtype.itemsize)
        self.nbytes += numel * dtype.itemsize
        made = self.master.memory.empty(numel, dtype, f"{what} of {self.master.bucket.label}")
        self._memory_tracker.claim(made)
        return made

    def fits(self, state: Mapping[torch.Tensor, dict[str, Any]], runs: Sequence[MasterRun]) -> bool:
        """Returns whether the states of some runs are all there, where the master keeps them."""
        places = self.master.states
        if any(key not in places or places[key].dtype != self.states[key].dtype for key in self.states):
            return False
        for run in runs:
            for key, value in state.get(run.param, {}).items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    continue
                if key not in self.states or value.data_ptr() != places[key][run.interval.start :].data_ptr():
                    return False
        return all(state.get(run.param) for run in runs)

    def wait(self) -> None:
        """Blocks the host until :attr:`out` may be written."""
        if self.copy is not None:
            self.copy.wait_on_host()
            self.copy = None

    def exchange(self) -> None:
        """Exchanges this set with the master's."""
        master = self.master
        if master.out is None:  # forwards read it where it is
            master.flat.copy_(self.flat)
        else:
            master.flat, self.flat = self.flat, master.flat
            for run in master.runs:
                run.param.data = master.flat[run.interval.start :][: run.param.numel()].view(run.param.shape)
        for key in self.states:
            master.states[key], self.states[key] = self.states[key], master.states[key]

    def close(self) -> None:
        """Subtracts the memory from the count. It is freed with the last reference."""
        self.wait()
        self._memory_tracker.add(StorageKind.SHADOW, Tier.HOST, -self.nbytes)


@dataclass(eq=False)
class SpeculativeUpdate:
    """A speculative update of one master: it starts before the gradient norm is known, and is kept or discarded."""

    shadow: ShadowMaster  # receives it
    gradients: GradientBucket  # what it reads
    used: list[bool]  # by tile, whether it got a gradient on this rank
    runs: tuple[MasterRun, ...]  # those that are updated
    factor: float | None  # multiplier of the gradient; None for exactly 1
    groups: list[dict[str, Any]]  # copies of the optimizer's param groups, without their parameters
    # by run: what its update changes; per-element states are parts of the shadow's
    states: dict[torch.Tensor, dict[str, Any]]
    # what was read: tensors with their versions, and numbers
    inputs: list[tuple[Any, Any]] = field(default_factory=list)
    updated: list[slice] = field(default_factory=list)  # the parts that were updated
    is_withdrawn: bool = False  # whether its result is no longer needed
    is_complete: bool = False  # whether the computation finished
    job: Future[None] = field(default_factory=Future)  # the worker's job

    @torch.no_grad()
    def compute(self, flat: FlatUpdate, live: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Makes the update in the shadow (1-D runs); ends early where it is withdrawn. Runs in the worker."""
        shadow, master = self.shadow, self.shadow.master
        grad = self.gradients.result  # waits for the copy to the host
        assert grad is not None
        shadow.wait()
        self.inputs = self._read(grad, live)
        numel = master.flat.numel()
        step = default_chunk_numel(master.flat.device)
        for start in range(0, numel, step):
            if self.is_withdrawn:
                return
            chunk = UpdateSlice(master, self.gradients, self.used, start, min(start + step, numel))
            part = slice(chunk.start, chunk.stop)
            shadow.flat[part].copy_(master.flat[part])
            for key, state in shadow.states.items():
                state[part].copy_(master.states[key][part])
            out = None if shadow.out is None else shadow.out[part]
            for made in update_chunk(
                flat, self.groups, self.states, chunk, Operands(shadow.flat[part], grad[part], None, out), self.factor
            ):
                first, last = start + made.start, start + made.stop
                if self.updated and self.updated[-1].stop == first:
                    first = self.updated.pop().start
                self.updated.append(slice(first, last))
        self.is_complete = True

    def _read(self, grad: torch.Tensor, live: Mapping[torch.Tensor, dict[str, Any]]) -> list[tuple[Any, Any]]:
        """Returns what the update depends on: each tensor with its version, and each number."""
        master = self.shadow.master
        values: list[Any] = [grad, master.flat]
        if master.out is None and not master.bucket.is_sharded:
            values += master.bucket.params  # the same memory, but torch counts its writes separately
        for run in self.runs:
            values += live[run.param].values()
        return [(value, value._version if isinstance(value, torch.Tensor) else None) for value in values]

    def is_right(
        self, factor: float | None, used: list[bool], optimizer: torch.optim.Optimizer, *, why: list[str]
    ) -> bool:
        """Returns whether no input has changed since the speculative update read it."""
        master = self.shadow.master
        if factor != self.factor:
            why.append(f"gradients are multiplied by {factor or 1.0:.6g}, not {self.factor or 1.0:.6g}")
        elif used != self.used or tuple(_used_runs(master, used)) != self.runs:
            why.append("other parameters got gradients on other ranks")
        elif any(not _same_group(self.groups[n], optimizer.param_groups[n]) for n in _groups_of(self.runs)):
            why.append("hyperparameters were changed after backward")
        elif not self._reads_the_same(optimizer):
            why.append("gradients, masters or states were written after backward")
        return not why

    def _reads_the_same(self, optimizer: torch.optim.Optimizer) -> bool:
        grad = self.gradients.result
        if grad is None or self.is_withdrawn or not self.is_complete:
            return False
        now = self._read(grad, optimizer.state)
        return len(now) == len(self.inputs) and all(
            (mine[0] is theirs[0] if isinstance(mine[0], torch.Tensor) else mine[0] == theirs[0])
            and mine[1] == theirs[1]
            for mine, theirs in zip(now, self.inputs, strict=True)
        )

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the result the master's and the optimizer's."""
        shadow = self.shadow
        shadow.exchange()
        places = shadow.master.states
        # Including runs that were not updated: their states have been copied to the other set.
        for run in shadow.master.runs:
            state, part = optimizer.state.get(run.param, {}), slice(run.interval.start, run.interval.stop)
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    if key in places and value.data_ptr() == shadow.states[key][part].data_ptr():
                        state[key] = places[key][part]
                elif run.param in self.states:
                    state[key] = self.states[run.param][key]


class SpeculativeUpdater:
    """Starts the updates of masters in host memory early, for one engine's optimizer.

    Attributes:
        kept: Updates of masters that were started early and kept.
        discarded: Those that were started early and discarded.

    Args:
        masters: All of this rank; those elsewhere than in host memory are left alone.
    """

    def __init__(
        self,
        masters: Sequence[MasterBucket],
        reducer: GradientReducer,
        flat: FlatUpdate,
        optimizer: torch.optim.Optimizer,
        *,
        strategies: Mapping[Tier, UpdateStrategy],
        loss_scaler: Any,
        memory_tracker: MemoryTracker,
    ) -> None:
        self._masters = masters
        self._reducer = reducer
        self._flat = flat
        self._optimizer = optimizer
        self._strategies = strategies
        self._loss_scaler = loss_scaler  # the fp16 loss scaler, or None
        self._memory_tracker = memory_tracker
        self._worker = _worker_factory.get()()
        self._shadows: dict[int, ShadowMaster] = {}
        self._open: dict[int, SpeculativeUpdate] = {}
        self._wrong_in_a_row = 0
        self._pause = 0  # updates to come without speculation
        self.kept = self.discarded = 0
        self.add_masters()
        reducer.speculate(self)

    def add_masters(self) -> None:
        """Makes shadows for masters that are new in the list."""
        for position, master in enumerate(self._masters):
            if position not in self._shadows and master.tier is Tier.HOST:
                dtypes: dict[str, torch.dtype] = {}
                for number in _groups_of(master.runs):
                    state = first_state(self._flat, self._optimizer.param_groups[number])
                    dtypes |= {key: v.dtype for key, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
                self._shadows[position] = ShadowMaster(master, dtypes, self._memory_tracker)

    def offer(self, position: int) -> None:
        """Starts the update of a master if all its inputs are available."""
        shadow, gradients = self._shadows.get(position), self._reducer.buckets[position]
        if shadow is None or self._pause or position in self._open or not gradients.is_final:
            return
        used, state = list(gradients.used), self._optimizer.state
        runs = _used_runs(shadow.master, used)
        whole = all(len({used[tile] for tile, _, _ in shadow.master.tile_intervals(run.interval)}) == 1 for run in runs)
        if not runs or not whole or not shadow.fits(state, runs):
            return
        scale = 1.0 if self._loss_scaler is None else float(self._loss_scaler.loss_scale)
        started = SpeculativeUpdate(
            shadow,
            gradients,
            used,
            tuple(runs),
            gradient_factor(0.0, scale=scale, clip_grad=0.0),
            [_copy_of_group(group) for group in self._optimizer.param_groups],
            {run.param: _shadow_state(shadow, run, state[run.param]) for run in runs},
        )
        self._open[position] = started
        started.job = self._worker.submit(lambda: started.compute(self._flat, state))

    def note_write(self, position: int) -> None:
        """Records that a program has written parameters of a bucket."""
        if position in self._open:
            self._open[position].is_withdrawn = True

    def withdraw(self) -> None:
        """Discards what was started. When it returns, the worker reads nothing any more."""
        for started in self._open.values():
            started.is_withdrawn = True
        running = [started.job for started in self._open.values() if not started.job.cancel()]
        # Their errors are not raised: the results are not needed, and the update itself would raise again.
        wait(running)
        self.discarded += len(running)
        self._open.clear()

    def settle(self, factor: float | None, used: Sequence[list[bool]]) -> dict[int, SpeculativeUpdate]:
        """Returns the updates to keep, by position; discards the others.

        Updates that the worker has not started are left to the caller, which updates in place.
        """
        started = {position: one for position, one in self._open.items() if not one.job.cancel()}
        kept: dict[int, SpeculativeUpdate] = {}
        reasons: list[str] = []
        for position, one in started.items():
            one.is_withdrawn = one.is_withdrawn or factor != one.factor  # ends early
            one.job.result()
            why: list[str] = []
            if one.is_right(factor, used[position], self._optimizer, why=why):
                kept[position] = one
            reasons += why
        self.kept += len(kept)
        self.discarded += len(started) - len(kept)
        self._open.clear()
        self._decide_on_pause(bool(started), reasons)
        return kept

    def _decide_on_pause(self, has_started: bool, reasons: Sequence[str]) -> None:
        """Pauses speculation after several wrong updates in a row, which cost more time than they save."""
        if self._pause:
            self._pause -= 1
        if reasons:
            self._wrong_in_a_row += 1
            self._pause = min(2 ** (self._wrong_in_a_row - 1) - 1, _LONGEST_PAUSE)
            if self._pause == _LONGEST_PAUSE:
                log_dist(
                    f"offload_optimizer.super_offload: {self._wrong_in_a_row} updates in a row that were "
                    f"started before the norm was known had to be repeated ({reasons[0]}); the next "
                    f"{self._pause} start after it"
                )
        elif has_started:
            self._wrong_in_a_row = 0

    def store(self, one: SpeculativeUpdate) -> None:
        """Applies a kept result, and starts to copy its compute parameters to where forwards read them."""
        one.keep(self._optimizer)
        shadow, master = one.shadow, one.shadow.master
        if shadow.out is not None:
            chunk = UpdateSlice(master, one.gradients, one.used, 0, master.flat.numel())
            operands = Operands(master.flat, master.flat, None, shadow.out)
            shadow.copy = self._strategies[master.tier].store_whole(chunk, operands, one.updated)

    def close(self) -> None:
        """Ends the worker and frees the memory. May be called twice."""
        self.withdraw()
        self._worker.close()
        for shadow in self._shadows.values():
            shadow.close()
        if self._shadows:
            log_dist(
                "offload_optimizer.super_offload: of the updates of single buckets that were started before "
                f"the norm was known, {self.kept} were kept and {self.discarded} discarded"
            )
        self._shadows.clear()


def _used_runs(master: MasterBucket, used: Sequence[bool]) -> list[MasterRun]:
    return [run for run in master.runs if used[master.tile_intervals(run.interval)[0][0]]]


def _groups_of(runs: Sequence[MasterRun]) -> list[int]:
    return sorted({run.interval.param_group for run in runs})


def _copy_of_group(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters as they are now; tensors and lists may be changed in place later."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else list(value) if isinstance(value, list) else value

    return {key: copied(value) for key, value in group.items() if key != "params"}


def _same_group(before: dict[str, Any], group: dict[str, Any]) -> bool:
    now = {key: value for key, value in group.items() if key != "params"}
    return now.keys() == before.keys() and all(bool(before[key] == value) for key, value in now.items())


def _shadow_state(shadow: ShadowMaster, run: MasterRun, state: dict[str, Any]) -> dict[str, Any]:
    """Returns what the update of a run changes: parts of the shadow, and copies of everything else."""
    made: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            made[key] = shadow.states[key][run.interval.start : run.interval.stop] if value.dim() else value.clone()
        else:
            made[key] = value
    return made
