"""A gradient that is not finite: the step is skipped on all ranks, nothing changes, one line shows where."""

import logging
import re
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from deepspeed.engine import initialize
from deepspeed.errors import NonFiniteError
from tests.engine.support import SHARDED, WIDTH, adamw, engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import Tower
from tests.zero.reading import full_masters, full_params, full_states

PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
}


class Poisoned(Tower):
    """Adds a factor to one parameter's path; infinity or NaN there reaches that parameter's gradient first."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, poison=1.0):
        loss = super().forward(x)
        return loss + (self.factor * poison).float().sum() * 1e-3


@contextmanager
def lines():
    """What the package logs on this rank meanwhile."""
    seen: list[str] = []

    class ListHandler(logging.Handler):
        def emit(self, record):
            seen.append(record.getMessage())

    handler, logger = ListHandler(), logging.getLogger("DeepSpeed")
    logger.addHandler(handler)
    try:
        yield seen
    finally:
        logger.removeHandler(handler)


def _everything(engine):
    return {
        "masters": full_masters(engine),
        "params": full_params(engine),
        "states": full_states(engine),
        "lr": engine.get_lr(),
        "schedule": engine.lr_scheduler.state_dict(),
        "steps": [float(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state],
    }


def _skip(stage, precision, poison, accumulation):
    model = Poisoned()
    optimizer = adamw(model)
    zero = {"stage": stage, **(SHARDED if stage == 3 else {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
        **PRECISIONS[precision],
    }
    engine, *_ = initialize(model=model, optimizer=optimizer, lr_scheduler=StepLR(optimizer, 1, 0.9), config=config)

    def step(number, poison):
        for micro in range(accumulation):
            bad = rank() == 1 and micro == 0
            engine.backward(engine(inputs(number, micro, rank()), poison if bad else 1.0))
            engine.step()

    step(0, 1.0)
    before = _everything(engine)
    with lines() as seen:
        step(1, poison)
    assert engine.optimizer.overflow and not engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps) == (2, 1)
    assert_states_equal(_everything(engine), before)
    notices = [line for line in seen if "not finite" in line or "skip" in line]
    assert len(notices) == (1 if rank() == 0 else 0), notices
    if notices:
        assert re.search(r"step 2\b.*rank \d", notices[0]), notices
        assert "'factor'" in notices[0], notices
        if precision == "fp16":
            assert "256" in notices[0] and "128" in notices[0], "the scale before and after"
    step(2, 1.0)
    assert not engine.optimizer.overflow and engine.was_step_applied() and engine.skipped_steps == 1
    assert torch.isfinite(full_masters(engine)["factor"]).all()
    return full_masters(engine)


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_step_is_skipped_everywhere(precision, poison):
    """Weights, moments, step counts, schedule: nothing moves. Afterwards training continues, alike at every stage."""
    results = [run_ranks(_skip, 2, stage, precision, poison, 1) for stage in range(4)]
    for result in results:
        assert_states_equal(result[1], result[0])
        assert_states_equal(result[0], results[0][0])


@pytest.mark.parametrize("stage", [0, 2])
def test_one_bad_micro_batch_skips_the_whole_step(stage):
    run_ranks(_skip, 2, stage, "bf16", float("nan"), 3)


def _too_many(stage):
    engine = engine_of(Poisoned(), stage, bf16={"enabled": True}, max_consecutive_skipped_steps=3)

    def step(number, poison):
        engine.backward(engine(inputs(number, rank()), poison if rank() == 1 else 1.0))
        engine.step()

    for number in range(2):
        step(number, float("nan"))
    step(2, 1.0)  # a good one starts the count again
    for number in range(3, 5):
        step(number, float("nan"))
    with pytest.raises(NonFiniteError) as caught:
        step(5, float("nan"))
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_skips_in_a_row_end_the_training(stage):
    """The error names step, rank and parameter of the first of them, on every rank."""
    texts = run_ranks(_too_many, 2, stage)
    assert texts[0] == texts[1]
    assert "step 4" in texts[0] and "'factor'" in texts[0], texts[0]
    assert "rank" in texts[0] and "max_consecutive_skipped_steps" in texts[0]


@on_ranks(1)
def test_zero_means_never():
    stage = 1
    engine = engine_of(Poisoned(), stage, bf16={"enabled": True}, max_consecutive_skipped_steps=0)
    for number in range(105):
        engine.backward(engine(inputs(number, rank()), float("inf")))
        engine.step()
    assert engine.skipped_steps == 105


def test_a_hundred_by_default():
    def default() -> int:
        from deepspeed.config import parse

        return parse({"train_batch_size": 1}, dp_world_size=1).root.max_consecutive_skipped_steps

    assert default() == 100


@on_ranks(2)
def test_the_check_can_be_switched_off():
    """check_grad_overflow false: the user wants no check, so the step is applied whatever comes."""
    engine = engine_of(Poisoned(), 1, bf16={"enabled": True, "check_grad_overflow": False})
    engine.backward(engine(inputs(0, rank()), float("nan") if rank() else 1.0))
    engine.step()
    assert (engine.optimizer.overflow, full_masters(engine)["factor"].isnan().all().item()) == (False, True)
