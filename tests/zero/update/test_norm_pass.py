"""The gradient norm is taken while gradients are summed; the update reads no gradient for it a second time."""

from typing import Any

import pytest

import deepspeed
from deepspeed.zero.gradient import gradients
from deepspeed.zero.gradient.gradient_sum import norm_from_squares, squared_norm
from tests.harness import run_ranks
from tests.offload.training import config, make_engine, train_some


def watched(every: list[dict[str, Any]]) -> list[int]:
    """Trains; every sum of squares must have been there before it was asked for, and be that of the gradient."""
    counts = []
    original = gradients.GradientBucket.sum_of_squares

    def checked(self: gradients.GradientBucket) -> float:
        result = self.result
        if result is None:
            return original(self)
        assert self.sum.squares is not None, self.bucket.label
        found = original(self)
        assert norm_from_squares(found) == norm_from_squares(squared_norm(result).item()), self.bucket.label
        counts[-1] += 1
        return found

    gradients.GradientBucket.sum_of_squares = checked
    try:
        for settings in every:
            counts.append(0)
            engine = make_engine(settings)
            train_some(engine, range(2))
            engine.destroy()
    finally:
        gradients.GradientBucket.sum_of_squares = original
    return counts


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_pass_of_its_own(ranks: int) -> None:
    every = [
        config(stage, precision=precision, accumulation=accumulation)
        for stage, precision in ((0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp16"))
        for accumulation in (1, 3)
    ]
    every.append(config(2, precision="bf16", accumulation=2, offload_optimizer={"device": "cpu"}))
    for counts in run_ranks(watched, ranks, every):
        assert all(count >= 2 for count in counts), counts


def written(settings: dict[str, Any]) -> float:
    """The norm after somebody has replaced a gradient."""
    from tests.harness.toy_models import losses_of, make_batch

    engine = make_engine(settings)
    engine.backward(losses_of(engine(make_batch(0, 0, 0, branch=True))).loss)
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            value = deepspeed.utils.safe_get_full_grad(parameter)
            if value is not None:
                deepspeed.utils.safe_set_full_grad(parameter, value * 0)
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return norm


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_written_gradient_counts(ranks: int) -> None:
    for stage in (0, 3):
        assert run_ranks(written, ranks, config(stage, precision="bf16")) == [0.0] * ranks
