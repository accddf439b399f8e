"""Collects an engine's state for a checkpoint, and continues an engine from one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from deepspeed.checkpoint.run_state import COUNTERS, RunState
from deepspeed.engine.features import renamings
from deepspeed.release import VERSION

if TYPE_CHECKING:
    from deepspeed.checkpoint.load import LoadResult
    from deepspeed.engine.engine import EngineBase


def run_state_of(engine: EngineBase) -> RunState:
    """Returns the state that a checkpoint of this engine would hold now."""
    return RunState(
        model=engine.module,
        runtime=engine._runtime,
        updater=engine._updater,
        lr_scheduler=engine.lr_scheduler,
        dataloader=engine.training_dataloader,
        counters={name: getattr(engine, name) for name in COUNTERS},
        config=engine.config,
        settings=engine._root.checkpoint,
        precision=engine._precision.name,
        stage=engine._root.zero_optimization.stage,
        dp_world_size=engine._parts.coordinates.zero_size,
        model_size=engine._parts.coordinates.model_size,
        version=VERSION,
        states=engine._hooks.states,
        use_fp32_weights=engine._root.zero_optimization.load_from_fp32_weights,
        renamings=functools.partial(renamings, engine.module),
    )


def resume_from(engine: EngineBase, loaded: LoadResult) -> None:
    """Continues from the position of the run that saved a checkpoint; accumulation starts over."""
    for name, value in loaded.counters.items():
        setattr(engine, name, value)
    engine._batches.count_anew()
    engine._loading.resume(engine.global_steps, engine.training_dataloader)
    engine._hooks.resume(engine.global_steps, engine.skipped_steps)
    engine._train_step.forget_losses()  # their gradients were those of the former weights
    if engine._updater is not None:
        engine._updater.steps = engine.global_steps
    engine.loaded_checkpoint_dp_world_size = loaded.world_size
    engine.loaded_checkpoint_mp_world_size = loaded.model_size
