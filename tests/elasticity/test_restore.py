"""What is left of an engine whose job is over."""

import numpy
import pytest
import torch

import deepspeed
from deepspeed.elasticity import ElasticSteps
from deepspeed.elasticity.continuation import continuation_of
from deepspeed.elasticity.restore import build_again, restore, take_apart
from deepspeed.engine.resuming import run_state_of
from tests.elasticity.program import SAMPLES, order
from tests.harness import on_ranks, run_ranks


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


ELASTIC = {
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam"},
    "elasticity": {"continue": True},
}


@on_ranks(1)
def test_layers_keep_their_mode_when_an_engine_is_rebuilt() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    engine, *_ = deepspeed.initialize(model=model, config=ELASTIC)
    model[1].eval()  # its statistics stay as they are
    found = []
    for mode in (True, False):
        engine.training = mode
        take_apart(engine)
        build_again(engine)
        found.append([module.training for module in (engine, model, *model)])
    assert found == [[True, True, True, False], [False, True, True, False]]


def _restored_buffers():
    model = torch.nn.Linear(8, 8)
    model.register_buffer("repeated", torch.arange(2.0)[:, None].expand(2, 3))
    engine, *_ = deepspeed.initialize(model=model, config=ELASTIC)
    continuation = continuation_of(engine)
    continuation._hold_live_states()
    model.repeated[:, :1].fill_(7.0)
    number = continuation.run.members.links.number
    restore(
        engine,
        run_state_of(engine),
        continuation.run.held,
        (0, 0),
        number,
        continuation._transport,
        [number],
    )
    steps = ElasticSteps(engine, range(SAMPLES), 1, seed=numpy.int64(3))
    return model.repeated.tolist(), [steps.sample(position) for position in range(4)]


def test_expanded_buffers_are_restored_and_seeds_may_be_numpys():
    ((buffer, samples),) = run_ranks(_restored_buffers, 1)
    assert buffer == [[0.0] * 3, [1.0] * 3]
    assert samples == [order(position, 3) for position in range(4)]
