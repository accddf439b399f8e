"""Pipelines compute what one process computes: losses, norms, weights; at every ZeRO stage, with several copies."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.harness.pool import run_ranks
from tests.parallel.pipe import support


def _train(stages: int, stage: int, count: int, **given: Any) -> tuple[Any, dict[str, torch.Tensor], bool]:
    engine = support.engine_of(stages, stage, count, **given)
    losses = support.train(engine, count)
    return losses, support.weights(engine), not engine.pipe_buffers["inputs"]


@cache
def _expected(copies: int, count: int) -> tuple[Any, dict[str, torch.Tensor]]:
    return run_ranks(support.reference, 1, copies, count)[0]


def check(world: int, stages: int, stage: int, count: int, **given: Any) -> None:
    losses, values = _expected(world // stages, count)
    results = run_ranks(_train, world, stages, stage, count, **given)
    merged: dict[str, torch.Tensor] = {}
    for losses_and_norms, weights, is_clean in results:
        assert is_clean and losses_and_norms == results[0][0]
        for name, value in weights.items():
            assert torch.equal(merged.setdefault(name, value), value), f"{name} differs between its copies"
    torch.testing.assert_close(torch.tensor(results[0][0]), torch.tensor(losses), rtol=2e-6, atol=1e-6)
    assert merged.keys() == values.keys()
    for name, value in values.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-5, atol=2e-6, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize(("world", "stages", "stage"), [(1, 1, 0), (2, 2, 1), (4, 2, 0), (4, 2, 3), (4, 4, 2)])
def test_equal_to_one_process(world, stages, stage):
    check(world, stages, stage, 4, more={"zero": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {})


@pytest.mark.parametrize("stage", [1, 2])
def test_two_copies(stage):
    check(4, 2, stage, 3)


@pytest.mark.parametrize(
    ("schedule", "world", "stages", "stage", "count"),
    [("interleaved", 2, 2, 1, 4), ("zb-h1", 2, 2, 2, 4), ("zbv", 4, 2, 3, 4), ("dualpipev", 2, 2, 0, 5)],
)
def test_schedules(schedule, world, stages, stage, count):
    check(world, stages, stage, count, schedule=schedule)
