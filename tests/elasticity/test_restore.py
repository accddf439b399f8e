"""What is left of an engine whose job is over."""

from __future__ import annotations

import pytest
import torch

import deepspeed
from deepspeed.elasticity.restore import build_again, take_apart
from tests.harness import run_ranks


def _raise(*_):
    raise RuntimeError("a rank was lost")


def _lost_in_a_backward():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    model[1].register_forward_pre_hook(lambda _, inputs: inputs[0].register_hook(_raise) and None)
    loss = engine(torch.ones(1, 8)).sum()
    with pytest.raises(RuntimeError, match="a rank was lost"):
        engine.backward(loss)
    schedule = engine._runtime.schedule
    drop = schedule.drop

    def lost():  # as a wait for a gather that cannot arrive
        schedule.drop = drop
        _raise()

    schedule.drop = lost
    take_apart(engine)
    take_apart(engine)  # a further rank was lost before a new engine had the parameters
    return [tuple(parameter.shape) for parameter in model.parameters()]


def test_parameters_keep_their_shape_when_a_rebuild_fails_and_begins_again():
    assert run_ranks(_lost_in_a_backward, 2) == [[(8, 8), (8,), (8, 8), (8,)]] * 2


def _modes_after_a_rebuild():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    config = {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "elasticity": {"continue": True},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    model[1].eval()  # its statistics stay as they are
    found = []
    for mode in (True, False):
        engine.training = mode
        take_apart(engine)
        build_again(engine)
        found.append([module.training for module in (engine, model, *model)])
    return found


def test_layers_keep_their_mode_when_an_engine_is_rebuilt():
    assert run_ranks(_modes_after_a_rebuild, 1) == [[[True, True, True, False], [False, True, True, False]]]
