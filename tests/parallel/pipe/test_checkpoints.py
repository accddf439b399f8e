"""A checkpoint of any pipeline continues in any other: stages, copies, ZeRO stage, schedule; tied weights included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness.pool import run_ranks
from tests.parallel.pipe import support

COUNT = 4


def _whole_run(stages: int, stage: int, folder: str, **given: Any) -> list[tuple[float, float]]:
    engine = support.engine_of(stages, stage, COUNT, **given)
    support.train(engine, COUNT, 2)
    engine.save_checkpoint(folder, client_state={"seen": 2})
    return support.train(engine, COUNT, 2, first=2)


def _continued(stages: int, stage: int, folder: str, **given: Any) -> list[tuple[float, float]]:
    engine = support.engine_of(stages, stage, COUNT, **given)
    path, client = engine.load_checkpoint(folder)
    assert path is not None and client["seen"] == 2 and engine.global_steps == 2
    return support.train(engine, COUNT, 2, first=2)


SHAPES = {
    "one": (1, 1, 0, {}),
    "two stages": (2, 2, 1, {}),
    "two stages, two copies, stage 3": (4, 2, 3, {"more": {"zero": {"stage3_param_persistence_threshold": 0}}}),
    "interleaved": (2, 2, 2, {"schedule": "interleaved"}),
    "V": (2, 2, 1, {"schedule": "zbv"}),
}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("two stages", "one"), ("two stages", "interleaved"), ("one", "V")],
)
def test_any_to_any(saved, loaded, tmp_path):
    world, stages, stage, given = SHAPES[saved]
    expected = run_ranks(_whole_run, world, stages, stage, str(tmp_path), **given)[0]
    world, stages, stage, given = SHAPES[loaded]
    found = run_ranks(_continued, world, stages, stage, str(tmp_path), **given)[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("other", ["two stages, two copies, stage 3"])
def test_with_copies(other, tmp_path):
    """Copies see other samples, so the run that continues is compared with one of its own shape."""
    world, stages, stage, given = SHAPES[other]
    expected = run_ranks(_whole_run, world, stages, stage, str(tmp_path), **given)[0]
    found = run_ranks(_continued, 4, 2, 1, str(tmp_path))[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-6, atol=1e-6)


def _exported(folder: str) -> dict[str, torch.Tensor]:
    engine = support.engine_of(2, 1, COUNT)
    support.train(engine, COUNT, 1)
    engine.save_checkpoint(folder)
    return support.weights(engine)


def test_export_to_one_state_dict(tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    parts = run_ranks(_exported, 2, str(tmp_path))
    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    expected = {**parts[0], **parts[1]}
    assert state.keys() == expected.keys()
    assert all(
        torch.equal(torch.as_tensor(state[name]).reshape(value.shape), value) for name, value in expected.items()
    )
