"""Checkpoints and gradient accumulation: nothing of the former run is left in the first update after a load."""

from pathlib import Path

import torch
import torch.distributed as dist

from deepspeed.engine import DeepSpeedEngine
from tests.engine.support import engine_of, inputs
from tests.harness import assert_states_equal, on_ranks
from tests.harness.toy_models import tower


def steps(engine: DeepSpeedEngine, *numbers: int) -> None:
    for step in numbers:
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(inputs(step, micro, dist.get_rank())))
            engine.step()


def masters(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    return [master.flat.clone() for master in engine._runtime.masters]


@on_ranks(2)
def test_pending_gradients_do_not_survive_a_load(tmp_path: Path) -> None:
    """Gradients that wait for an update when a checkpoint is loaded are those of other weights."""
    stages = (0, 2, 3)
    for stage in stages:
        engine = engine_of(tower(), stage, accumulation=2)
        steps(engine, 0)
        engine.save_checkpoint(tmp_path, tag=f"stage{stage}")
        steps(engine, 1)
        expected = masters(engine)
        engine.backward(engine(inputs(7, dist.get_rank())))
        engine.step()  # the first of two micro-batches
        engine.load_checkpoint(tmp_path, tag=f"stage{stage}")
        steps(engine, 1)
        assert_states_equal(masters(engine), expected)
        engine.destroy()


def updates(engine: DeepSpeedEngine, count: int) -> list[int]:
    """The numbers of the next micro-steps that end in an update."""
    found = []
    for micro in range(count):
        before = engine.global_steps
        engine.backward(engine(inputs(micro, dist.get_rank())))
        engine.step()
        if engine.global_steps > before:
            found.append(micro)
    return found


@on_ranks(2)
def test_accumulation_steps_may_change(tmp_path: Path) -> None:
    """Every update has all its micro-batches, also the first after the accumulation steps have changed."""
    engine = engine_of(tower(), 1, accumulation=3)
    steps(engine, 0)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine = engine_of(tower(), 1, accumulation=4)
    engine.load_checkpoint(tmp_path)
    assert updates(engine, 9) == [3, 7]
    engine.set_train_batch_size(2 * dist.get_world_size() * 3)
    assert updates(engine, 5) == [1, 4], "the micro-step since the last update counts"
    engine.destroy()
