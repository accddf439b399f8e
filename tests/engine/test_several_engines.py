"""Several engines in one process, as for a generator and a discriminator: each trains as it would alone."""

import pytest
import torch

from deepspeed.errors import CallOrderError
from tests.engine.support import SHARDED, adamw, engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters


def _alone(stage, seed):
    engine = engine_of(tower(seed=seed), stage)
    for step in range(3):
        engine.backward(engine(inputs(step, seed, rank())))
        engine.step()
    return full_masters(engine)


@pytest.mark.parametrize("stages", [(3, 3), (0, 3, 2), (1, 1)], ids=str)
@on_ranks(2)
def test_interleaved(stages):
    expected = [_alone(stage, seed) for seed, stage in enumerate(stages)]
    engines = [engine_of(tower(seed=seed), stage) for seed, stage in enumerate(stages)]
    for step in range(3):
        losses = [engine(inputs(step, seed, rank())) for seed, engine in enumerate(engines)]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in reversed(engines):
            engine.step()
    for engine, wanted in zip(engines, expected, strict=True):
        assert_states_equal(full_masters(engine), wanted)


@on_ranks(2)
def test_one_loss_through_two_engines():
    """One loss through two engines: both see the backward, through whichever it was called."""
    stages = (3, 3)
    engines = [engine_of(tower(seed=seed), stage) for seed, stage in enumerate(stages)]
    plain = [tower(seed=seed) for seed in range(2)]
    optimizers = [adamw(model) for model in plain]
    for step in range(3):
        x = inputs(step)
        (engines[0](x) * engines[1](x)).backward()
        for engine in engines:
            engine.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        (plain[0](x) * plain[1](x)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for engine, model in zip(engines, plain, strict=True):
        for name, value in full_masters(engine).items():
            torch.testing.assert_close(value, model.get_parameter(name).data, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_model_is_wrapped_again():
    """A destroyed engine leaves nothing behind on the model: it can be wrapped again."""
    model = tower()
    first = engine_of(model, 1)
    first.backward(first(inputs(0, rank())))
    first.step()
    after_one = full_masters(first)
    first.destroy()
    first.destroy()
    loss = first(inputs(1, rank()))
    for call, refused in {"backward": lambda: first.backward(loss), "step": first.step}.items():
        with pytest.raises(CallOrderError, match=rf"engine.{call}: this engine was destroyed"):
            refused()  # it trained each rank by itself
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    second = engine_of(model, 3, zero=SHARDED)
    assert_states_equal(full_masters(second), after_one)
    second.backward(second(inputs(1, rank())))
    second.step()
    assert second.global_steps == 1


@on_ranks(2)
def test_a_frozen_teacher():
    """An engine without optimizer at stage 3 beside one that learns from it."""
    teacher = engine_of(tower(seed=8), 3, optimizer=None)
    student = engine_of(tower(), 3)
    plain, wise = tower(), tower(seed=8)
    optimizer = adamw(plain)
    for step in range(3):
        x = inputs(step)
        with torch.no_grad():
            goal = teacher(x)
        student.backward((student(x) - goal).square())
        student.step()
        optimizer.zero_grad()
        (plain(x) - wise(x).detach()).square().backward()
        optimizer.step()
    for name, value in full_masters(student).items():
        torch.testing.assert_close(value, plain.get_parameter(name).data, rtol=1e-5, atol=1e-6)
    assert all(tuple(p.shape) == (0,) for p in teacher.module.parameters())
