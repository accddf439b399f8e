"""A run that resumes where some parameters have been unfrozen goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from deepspeed.checkpoint import load
from deepspeed.engine import DeepSpeedEngine
from tests.engine.support import SHARDED, engine_of, inputs
from tests.harness import assert_states_equal, run_ranks
from tests.harness.toy_models import tower


def make(stage: int, device: str) -> DeepSpeedEngine:
    model = tower()
    model.first.requires_grad_(False)
    zero = {**SHARDED, "offload_optimizer": {"device": device}} if stage == 3 else {}
    return engine_of(model, stage, zero=zero, bf16={"enabled": True})


def train(engine: DeepSpeedEngine, *steps: int) -> list[torch.Tensor]:
    for step in steps:
        engine.backward(engine(inputs(step, dist.get_rank())))
        engine.step()
    return [master.flat.clone() for master in engine._runtime.masters]


def resumed(folder: Path) -> None:
    for stage, device in ((0, "none"), (3, "none"), (3, "cpu")):
        engine = make(stage, device)
        train(engine, 0)
        engine.module.first.requires_grad_(True)
        train(engine, 1, 2)
        engine.save_checkpoint(folder, tag=f"{stage}{device}")
        expected = train(engine, 3)
        engine.destroy()
        engine = make(stage, device)
        engine.module.first.requires_grad_(True)
        engine.load_checkpoint(folder, tag=f"{stage}{device}")  # before any backward
        assert_states_equal(train(engine, 3), expected)
        engine.destroy()
        engine = make(stage, device)
        with mock.patch.object(load, "log_dist") as logged:
            engine.load_checkpoint(folder, tag=f"{stage}{device}")
        assert "2 parameters have saved masters" in logged.call_args.args[0]
        engine.destroy()


def test_parameters_unfrozen_before_a_load(tmp_path: Path) -> None:
    run_ranks(resumed, 2, tmp_path)


def frozen_group(folder: Path) -> None:
    """Loads into a model in which a whole param group is frozen; its learning rate is the saved one."""
    rates = {}
    for is_frozen in (False, True):
        model = tower()
        model.first.requires_grad_(not is_frozen)
        groups = [{"params": list(model.layers.parameters()), "lr": 0.1}, {"params": list(model.first.parameters())}]
        optimizer = torch.optim.SGD(groups, lr=0.2)
        engine = engine_of(model, 1, optimizer=lambda _, made=optimizer: made)
        if is_frozen:
            engine.load_checkpoint(folder)
        else:
            for group in optimizer.param_groups:
                group["lr"] /= 4
            train(engine, 0)
            engine.save_checkpoint(folder)
        rates[is_frozen] = [group["lr"] for group in engine.optimizer.param_groups]
        engine.destroy()
    assert rates[True] == rates[False] == [0.025, 0.05]


def test_a_param_group_that_is_frozen_at_a_load_keeps_its_learning_rate(tmp_path: Path) -> None:
    run_ranks(frozen_group, 2, tmp_path)
