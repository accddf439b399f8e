"""The fp16 loss scale: torch's sequence, hysteresis, the floor, and the forgotten engine.scale."""

import pytest
import torch

from deepspeed.errors import CallOrderError, NonFiniteError
from tests.engine.support import engine_of, inputs, rank
from tests.engine.test_overflow import Poisoned
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters

SCRIPT = [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]


def _scales(stage, script, **fp16):
    engine = engine_of(Poisoned(), stage, fp16={"enabled": True, **fp16})
    scales = []
    for step, overflow in enumerate(script):
        poison = float("inf") if overflow and rank() == 0 else 1.0
        engine.backward(engine(inputs(step, rank()), poison))
        engine.step()
        assert engine.optimizer.overflow is bool(overflow)
        scales.append(engine.optimizer.loss_scale)
    return scales


def _torch_scales(script, init, window):
    scaler = torch.amp.GradScaler("cpu", init, growth_interval=window)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scales = []
    for overflow in script:
        scaler.scale(torch.zeros(()))
        parameter.grad = torch.tensor([float("inf") if overflow else 1.0])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hysteresis_1_follows_torch(stage):
    expected = _torch_scales(SCRIPT, 2.0**10, 3)
    for found in run_ranks(_scales, 2, stage, SCRIPT, initial_scale_power=10, loss_scale_window=3, hysteresis=1):
        assert found == expected


def test_hysteresis_2_forgives_one_overflow():
    script = [1, 0, 1, 1]
    assert run_ranks(_scales, 1, 1, script, initial_scale_power=10, hysteresis=2) == [[1024, 1024, 512, 256]]


def test_consecutive_hysteresis_is_refilled_by_a_good_step():
    script = [1, 0, 1, 0, 1, 1]
    found = run_ranks(_scales, 1, 1, script, initial_scale_power=10, hysteresis=2, consecutive_hysteresis=True)
    assert found == [[1024, 1024, 1024, 1024, 1024, 512]]


def test_a_static_scale_stays():
    assert run_ranks(_scales, 1, 2, [0, 1, 0, 1], loss_scale=64) == [[64, 64, 64, 64]]


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
