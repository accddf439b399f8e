"""1-bit Adam on stages of a pipeline with tied weights: the same as without stages, and of one norm everywhere."""

from typing import Any

import torch

from tests.engine.support import same_on_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.parallel.pipe.support import engine_of, train, weights

COUNT, STEPS = 2, 5
OPTIMIZER: dict[str, Any] = {
    "type": "OneBitAdam",
    "params": {"lr": 1e-2, "freeze_step": 2, "eps": 1e-3, "weight_decay": 0.1},
}


def stages(zero_stages: tuple[int, ...]) -> list[Any]:
    """Two stages by two data ranks."""
    result = []
    for zero in zero_stages:
        engine = engine_of(2, zero, COUNT, {"optimizer": OPTIMIZER})
        steps = train(engine, COUNT, STEPS)
        assert same_on_all_ranks(steps)
        result.append((steps, weights(engine)))
        tied = {name: value.tolist() for name, value in result[-1][1].items() if "embed" in name or "tied" in name}
        assert tied and same_on_all_ranks(tied)  # both ends have the same weights still
        engine.destroy()
    return result


def whole() -> tuple[list[Any], list[Any]]:
    """Two data ranks, no stages: with other buckets signs have other scales, so only the warm-up is the same."""
    engine = engine_of(1, 0, COUNT, {"optimizer": OPTIMIZER})
    return train(engine, COUNT, STEPS), []


def test_stages_of_a_pipeline() -> None:
    by_rank = run_ranks(stages, 4, (0, 1))
    expected, _ = run_ranks(whole, 2)[0]
    for steps, _ in by_rank[0]:
        for (loss, _), (other, _) in zip(steps[:3], expected[:3], strict=True):
            assert abs(loss - other) < 1e-5 * abs(other)
        for (_, norm), (_, other_norm) in zip(steps[:2], expected[:2], strict=True):
            assert abs(norm - other_norm) < 1e-4 * other_norm
        for loss, _ in steps:
            assert loss < 1.2 * expected[0][0]
    zero, one = by_rank[0]
    for name in zero[1]:  # the ZeRO stage changes nothing
        torch.testing.assert_close(zero[1][name], one[1][name], rtol=1e-5, atol=1e-6)


OTHERS: dict[str, dict[str, Any]] = {
    "OneBitLamb": {"freeze_step": 2},
    "ZeroOneAdam": {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 2},
}


@on_ranks(4)
def test_the_rest_of_the_family_on_stages() -> None:
    """The rest of the family on stages: ranks of a stage agree, both ends of a tie too, and the loss falls."""
    for name, params in OTHERS.items():
        section = {"type": name, "params": {"lr": 1e-2, "eps": 1e-3, **params}}
        engine = engine_of(2, 0, COUNT, {"optimizer": section})
        steps = train(engine, COUNT, 6)
        assert same_on_all_ranks(steps) and steps[-1][0] < steps[0][0], (name, steps)
        tied = {key: value.tolist() for key, value in weights(engine).items() if "embed" in key or "tied" in key}
        assert tied and same_on_all_ranks(tied), name
        engine.destroy()
