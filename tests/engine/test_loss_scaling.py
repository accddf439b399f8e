"""Loss scales, and steps that are skipped."""

import re

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from deepspeed.config import parse
from deepspeed.engine import initialize
from deepspeed.errors import CallOrderError, NonFiniteError
from tests.engine.support import SHARDED, WIDTH, adamw, engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.logged import logged
from tests.harness.toy_models import Tower, tower
from tests.zero.reading import full_masters, full_params, full_states

# The fp16 loss scale: torch's sequence, hysteresis, the floor, and the forgotten engine.scale.


TENTH = {"initial_scale_power": 10}


@pytest.mark.parametrize(
    ("stage", "script", "expected", "fp16"),
    [
        (2, [0, 0, 0, 1, 1, 0], [1024, 1024, 2048, 1024, 512, 512], {**TENTH, "loss_scale_window": 3, "hysteresis": 1}),
        (1, [1, 0, 1, 1], [1024, 1024, 512, 256], {**TENTH, "hysteresis": 2}),  # forgives one overflow
        # a good step refills what is forgiven
        (1, [1, 0, 1, 0, 1, 1], [1024] * 5 + [512], {**TENTH, "hysteresis": 2, "consecutive_hysteresis": True}),
        (2, [0, 1, 0, 1], [64] * 4, {"loss_scale": 64}),
    ],
)
@on_ranks(1, 2)
def test_scales_follow_the_keys(stage, script, expected, fp16):
    """The scaler alone is compared with torch's (tests/precision/test_loss_scaler.py)."""
    engine = engine_of(Poisoned(), stage, fp16={"enabled": True, **fp16})
    scales = []
    for step, overflow in enumerate(script):
        engine.backward(engine(inputs(step, rank()), float("inf") if overflow and rank() == 0 else 1.0))
        engine.step()
        assert engine.optimizer.overflow is bool(overflow)
        scales.append(engine.optimizer.loss_scale)
    assert scales == expected


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_an_overflow_at_the_floor_raises_on_every_rank(stage):
    engine = engine_of(
        Poisoned(), stage, fp16={"enabled": True, "initial_scale_power": 2, "min_loss_scale": 2, "hysteresis": 1}
    )
    before = full_masters(engine)
    scales = []
    for step in range(2):
        engine.backward(engine(inputs(step, rank()), float("inf")))
        if step == 1:
            with pytest.raises(NonFiniteError, match="minimum"):
                engine.step()
        else:
            engine.step()
        scales.append(engine.optimizer.loss_scale)
    assert_states_equal(full_masters(engine), before)
    assert scales == [2.0, 2.0]


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_forgotten_engine_scale_raises_at_the_first_step(stage):
    """And what the unscaled backward left is gone, so the next step is right."""
    engine = engine_of(tower(), stage, fp16={"enabled": True, "initial_scale_power": 8})
    before = full_masters(engine)
    engine(inputs(0, rank())).backward()
    with pytest.raises(CallOrderError, match=r"engine\.scale\(loss\)\.backward\(\)"):
        engine.step()
    assert_states_equal(full_masters(engine), before)
    engine.scale(engine(inputs(1, rank()))).backward()
    engine.step()
    right = full_masters(engine)

    other = engine_of(tower(), stage, fp16={"enabled": True, "initial_scale_power": 8})
    other.backward(other(inputs(1, rank())))
    other.step()
    assert_states_equal(right, full_masters(other))


@on_ranks(1)
def test_forgetting_it_in_a_later_micro_batch():
    """Forgetting it in the second micro-batch counts as well; engine.scale for one loss does not cover another."""
    engine = engine_of(tower(), 1, accumulation=2, fp16={"enabled": True, "initial_scale_power": 8})
    engine.scale(engine(inputs(0))).backward()
    engine.step()
    engine(inputs(1)).backward()
    with pytest.raises(CallOrderError, match="not scaled"):
        engine.step()


@on_ranks(1)
def test_discarded_gradients_of_an_unscaled_loss_are_no_error():
    engine = engine_of(tower(), 1, fp16={"enabled": True, "initial_scale_power": 8})
    engine(inputs(0)).backward()
    engine.zero_grad()
    engine.backward(engine(inputs(1)))
    engine.step()
    assert engine.was_step_applied()


@on_ranks(1)
def test_without_fp16_nothing_is_scaled():
    engine = engine_of(tower(), 1, bf16={"enabled": True})
    loss = engine(inputs(0))
    assert engine.scale(loss) is loss
    assert engine.optimizer.loss_scale == 1.0 and engine.optimizer.dynamic_loss_scale is False


def _norm_is_unscaled(stage, clip):
    fp32, fp16 = (
        engine_of(tower(), stage, gradient_clipping=clip, **config)
        for config in ({}, {"fp16": {"enabled": True, "initial_scale_power": 10}})
    )
    for engine in (fp32, fp16):
        engine.backward(engine(inputs(0, rank())))
        engine.step()
    assert fp32.optimizer._global_grad_norm == fp32.get_global_grad_norm()  # as BEiT and EVA read it
    return fp32.get_global_grad_norm(), fp16.get_global_grad_norm()


def test_the_reported_norm_is_unscaled_and_before_clipping():
    norms = {run_ranks(_norm_is_unscaled, 2, stage, clip)[0] for stage in range(4) for clip in (0.0, 0.01)}
    full, half = zip(*norms, strict=True)
    assert len(set(full)) == 1 and len(set(half)) == 1, "the same bits at every stage, clipped or not"
    assert half[0] == pytest.approx(full[0], rel=5e-3)


# A gradient that is not finite: the step is skipped on all ranks, nothing changes, one line shows where.


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
    with logged() as seen:
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
    assert parse({"train_batch_size": 1}, dp_world_size=1).root.max_consecutive_skipped_steps == 100


@on_ranks(2)
def test_the_check_can_be_switched_off():
    """check_grad_overflow false: the user wants no check, so the step is applied whatever comes."""
    engine = engine_of(Poisoned(), 1, bf16={"enabled": True, "check_grad_overflow": False})
    engine.backward(engine(inputs(0, rank()), float("nan") if rank() else 1.0))
    engine.step()
    assert (engine.optimizer.overflow, full_masters(engine)["factor"].isnan().all().item()) == (False, True)
