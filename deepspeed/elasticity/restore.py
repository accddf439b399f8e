"""Puts an engine where the copies in host memory were taken, whatever the number of ranks was then."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.fill import WeightFiller
from deepspeed.checkpoint.load import LoadResult
from deepspeed.checkpoint.optimizer_state import OptimizerFiller
from deepspeed.checkpoint.param_groups import choose_groups, schedule_for
from deepspeed.checkpoint.plan import match
from deepspeed.checkpoint.run_state import RunState
from deepspeed.checkpoint.source import TrainingState
from deepspeed.checkpoint.states import restore_random_state
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.comm.transports.transport import Transport
from deepspeed.elasticity.copies import CopyLayout, CopyStore, SmallStates, StateCopy
from deepspeed.elasticity.memory_source import CopyOnRank, MemorySource
from deepspeed.engine.resuming import resume_from
from deepspeed.errors import CheckpointError
from deepspeed.zero.access.whole_buckets import publish

_WHERE = Path("copies in host memory")


@dataclass(frozen=True)
class _CopyTable:
    """What a rank tells the others of the copies that it holds."""

    layout: CopyLayout | None
    copies: list[CopyOnRank]


def restore(
    engine: Any, run_state: RunState, held: CopyStore, key: tuple[int, int], number: int, transport: Transport
) -> int:
    """Fills an engine from copies. Every rank of the job must call it.

    Args:
        engine: The engine, fresh.
        run_state: What of it is filled.
        held: The copies of this process.
        key: Generation and epoch of those to take.
        number: Of this process among the members.
        transport: Between the ranks, over host memory.

    Returns:
        Bytes that came from other ranks.

    Raises:
        CheckpointError: The copies do not fit the model.
    """
    kept = held.of_key(key)
    mine = {copy.owner: copy for copy in kept}
    tables: list[_CopyTable] = gather_objects(
        transport, _own_words(kept, number, transport.rank), label="listing copies"
    )
    layout = next((each.layout for each in tables if each.layout is not None), None)
    if layout is None:
        raise CheckpointError(
            f"elasticity.continue: expected copies of model states of generation {key[0]} on some rank, found none. "
            "Start the run again from its last checkpoint"
        )
    listed = [copy for each in tables for copy in each.copies]
    source = MemorySource(layout, listed, mine, transport.rank)
    smalls = {copy.owner: copy.small for copy in sorted(listed, key=lambda each: not each.is_own)}
    own = pickle.loads(smalls[number] if number in smalls else listed[0].small)
    state = _training_state(own, listed, layout)
    shapes = {name: shape for name, shape in run_state.shapes().items() if name not in layout.left_out}
    matches, _, difference = match(source, shapes, run_state.aliases(), {})
    if difference.missing or difference.shapes:
        raise CheckpointError(f"the copies in host memory do not fit the model:\n{difference.table()}")
    weights = WeightFiller(run_state.runtime, source, matches)
    assert run_state.optimizer is not None
    optimizer = OptimizerFiller(
        run_state.optimizer, run_state.runtime.masters, source, state, matches, run_state.group_names()
    )
    optimizer.check()
    wanted = weights.wanted() + optimizer.wanted()
    source.check(wanted)
    came = source.fetch(wanted, transport, mine)
    optimizer.cut_runs()
    weights.fill()
    optimizer.fill()
    _restore_small(run_state, own, state, matches)
    publish(run_state.runtime)
    if run_state.runtime.reducer is not None:
        run_state.runtime.reducer.clear()
    resume_from(engine, LoadResult(_WHERE, {}, dict(state.counters), len(layout.owners), 1))
    if number in smalls:
        restore_random_state(own.forward.random)
    return came


def _own_words(kept: list[StateCopy], number: int, rank: int) -> _CopyTable:
    copies = [CopyOnRank(rank, copy.owner, copy.runs, copy.small, copy.owner == number) for copy in kept]
    return _CopyTable(kept[0].layout if kept else None, copies)


def _training_state(own: SmallStates, listed: list[CopyOnRank], layout: CopyLayout) -> TrainingState:
    scalars: dict[str, dict[str, Any]] = {}
    for copy in listed:
        small: SmallStates = pickle.loads(copy.small)
        for names, values in small.scalars:
            scalars.update({name: dict(values) for name in names})
    return TrainingState(
        counters=own.counters,
        world_size=len(layout.owners),
        optimizer=own.optimizer,
        param_groups=own.groups,
        scalars=scalars,
        loss_scaler=own.loss_scaler,
        skipped_in_a_row=own.skipped_in_a_row,
        lr_scheduler=own.lr_scheduler,
    )


@torch.no_grad()
def _restore_small(run_state: RunState, own: SmallStates, state: TrainingState, matches: Any) -> None:
    for name, buffer in run_state.buffers().items():
        buffer.copy_(own.forward.buffers[name])
    for key, module in run_state.extra_state_owners().items():
        if key in own.forward.extra_state:
            module.set_extra_state(own.forward.extra_state[key])
    present = run_state.schedule_state()
    if state.lr_scheduler is not None and present is not None:
        choices = choose_groups(state.param_groups, matches, run_state.group_names())
        run_state.lr_scheduler.load_state_dict(
            schedule_for(state.lr_scheduler, present, len(state.param_groups), choices)
        )
