"""A whole training step inside the engine's forward, as Lightning's manual optimization runs it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.harness import assert_states_equal, on_ranks


class Net(nn.Module):
    """Computes what ``step`` requests; ``bias`` is the root's own parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 3))
        self.bias = nn.Parameter(torch.zeros(3))
        self.step = None

    def predict(self, x):
        return self.layers(x) + self.bias

    def forward(self, x):
        if self.step is None:
            return self.predict(x)
        step, self.step = self.step, None
        return step(x)


def _engine(stage):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return deepspeed.initialize(model=Net(), config=config)[0]


def _batch(number):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def _train(engine, inside, calls):
    """Two backward passes for each update, and a look at the outputs between and after them."""
    seen = []

    def step(x):
        for _ in range(2):
            predict = {"root": engine.module, "method": engine.module.predict}[calls]
            loss = predict(x).square().mean() / 2
            engine.backward(loss)
            with torch.no_grad():
                seen.append(predict(x).mean().item())
        engine.step()
        seen.append(predict(x).mean().item())
        return loss.detach()

    for number in range(4):
        if inside:
            engine.module.step = step
            engine(_batch(number))
        else:
            _train_outside(engine, _batch(number), seen)
        assert not engine._runtime.passes.scopes
    return seen


def _train_outside(engine, x, seen):
    for _ in range(2):
        engine.backward(engine(x).square().mean() / 2)
        with torch.no_grad():
            seen.append(engine(x).mean().item())
    engine.step()
    with torch.no_grad():
        seen.append(engine(x).mean().item())


def _weights(engine):
    values = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            values[name] = parameter.detach().clone()
    return values


@on_ranks(2)
def test_the_place_of_the_step_changes_nothing():
    stages = [0, 2, 3]
    for stage in stages:
        outside = _engine(stage)
        expected = _train(outside, inside=False, calls="root")
        for calls in ("root", "method"):
            engine = _engine(stage)
            assert _train(engine, inside=True, calls=calls) == expected, (stage, calls)
            assert_states_equal(_weights(engine), _weights(outside))


@on_ranks(2)
def test_an_exception_after_the_inner_backward_leaves_a_usable_engine():
    engine, undisturbed = _engine(3), _engine(3)
    expected = _train(undisturbed, inside=True, calls="root")

    def fails_after_backward(x):
        engine.backward(engine.module(x).square().mean())
        raise RuntimeError("in the user's step")

    engine.module.step = fails_after_backward
    with pytest.raises(RuntimeError, match="in the user's step"):
        engine(_batch(0))
    engine.zero_grad()
    assert _train(engine, inside=True, calls="root") == expected
