"""Parameters that others replace after ``initialize``: their values are trained, or a warning is logged."""

from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from deepspeed.engine import DeepSpeedEngine
from deepspeed.zero import runtime
from tests.engine.support import engine_of, inputs
from tests.harness import assert_states_equal, on_ranks
from tests.harness.toy_models import tower


def train(engine: DeepSpeedEngine, *steps: int) -> dict[str, torch.Tensor]:
    for step in steps:
        engine.backward(engine(inputs(step, dist.get_rank())))
        engine.step()
    return {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


@on_ranks(2)
def test_values_that_were_assigned_are_trained(tmp_path: Path) -> None:
    stages = (0, 1, 2)
    folder = tmp_path
    for stage in stages:
        results = []
        for assign in (False, True):
            engine = engine_of(tower(), stage, bf16={"enabled": True})
            train(engine, 0)
            given = {name: tensor + 1 for name, tensor in engine.module.state_dict().items()}
            engine.module.load_state_dict(given, assign=assign)
            if stage == 0:  # else a forward takes them back
                engine.save_checkpoint(folder, tag=str(assign))
                assert_states_equal(dict(engine.module.state_dict()), given)
            results.append(train(engine, 1, 2))
            assert all(a is b for a, b in zip(engine.module.parameters(), engine.param_names, strict=True))
            engine.destroy()
        assert_states_equal(results[1], results[0])


@on_ranks(2)
def test_values_in_other_memory_are_trained() -> None:
    stages = (0, 1, 2)
    for stage in stages:
        results = []
        for in_place in (True, False):
            engine = engine_of(tower(), stage, bf16={"enabled": True})
            for parameter in engine.module.parameters():
                if in_place:
                    parameter.data.add_(1)
                else:
                    parameter.data = parameter.data + 1
            if in_place:  # writes through .data are not seen
                engine.optimizer.refresh_fp32_params()
            results.append(train(engine, 0, 1))
            engine.destroy()
        assert_states_equal(results[1], results[0])


@on_ranks(1)
def test_what_cannot_be_taken_back_raises() -> None:
    engine = engine_of(tower(), 0)
    engine.module.last = nn.Linear(9, 5)  # a module of its own is none of the engine's business
    engine.module.first.bias = nn.Parameter(torch.zeros(1))
    texts: list[str] = []
    with mock.patch.object(runtime, "warn_once", lambda key, message, ranks: texts.append(message)):
        engine(inputs(0))
    assert len(texts) == 1 and "'first.bias' was replaced by another one, of shape (1,)" in texts[0]
    engine.destroy()
