"""Forwards without gradients between, and in the middle of, training steps change nothing."""

import pytest
import torch

from tests.engine.support import engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters

LIMITS = [
    None,
    {"stage3_param_persistence_threshold": 0},
    {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 500, "stage3_max_reuse_distance": 0},
]


def _evaluate(engine, how):
    if how == "no_grad":
        with torch.no_grad():
            return engine(inputs(77)).item()
    if how == "inference_mode":
        with torch.inference_mode():
            return engine(inputs(77)).item()
    if how == "eval":
        engine.eval()
        with torch.no_grad():
            value = engine(inputs(77)).item()
        engine.train()
        return value
    if how == "module":
        with torch.no_grad():
            return engine.module(inputs(77)).item()
    return engine(inputs(77)).item()  # with gradients, thrown away


def _train(stage, how, zero, accumulation=2):
    engine = engine_of(tower(), stage, zero=zero, accumulation=accumulation)
    values = []
    for step in range(3):
        for micro in range(accumulation):
            if how:
                values.append(_evaluate(engine, how))
            loss = engine(inputs(step, micro, rank()))
            if how:
                again = _evaluate(engine, how)
                assert again == values[-1], "no step in between"
            engine.backward(loss)
            if how:
                assert _evaluate(engine, how) == again
            engine.step()
    return full_masters(engine), values


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_evaluation_leaves_no_trace(stage):
    for zero in LIMITS if stage == 3 else LIMITS[:1]:
        plain, _ = _train(stage, None, zero)
        for how in ("no_grad", "inference_mode", "eval", "module", "thrown away"):
            disturbed, values = _train(stage, how, zero)
            assert_states_equal(disturbed, plain)
            assert len(set(values)) == 3, f"evaluation sees every update: {how}, {zero}"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_two_forwards_before_their_backwards(stage):
    """Two forwards before their backwards, in either order; the gradients add up all the same."""
    results = []
    for order in ((0, 1), (1, 0)):
        engine = engine_of(tower(), stage)
        for step in range(2):
            losses = [engine(inputs(step, part, rank())) for part in range(2)]
            for part in order:
                engine.backward(losses[part])
            engine.step()
        results.append(full_masters(engine))
    engine = engine_of(tower(), stage)
    for step in range(2):
        for part in range(2):
            engine.backward(engine(inputs(step, part, rank())))
        engine.step()
    assert_states_equal(results[0], full_masters(engine))
    assert_states_equal(results[1], results[0], rtol=1e-5, atol=1e-7)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_retain_graph(stage):
    """The same graph twice: twice the gradient."""
    once, twice = (engine_of(tower(), stage, optimizer=_sgd) for _ in range(2))
    loss = once(inputs(0, rank()))
    once.backward(2 * loss)
    once.step()
    loss = twice(inputs(0, rank()))
    twice.backward(loss, retain_graph=True)
    twice.backward(loss)
    twice.step()
    assert_states_equal(full_masters(twice), full_masters(once), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_loss_of_two_forwards(stage):
    """Part of the loss is computed from what forward returned, outside of it."""
    engine, plain = engine_of(tower(), stage), tower()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-5, weight_decay=0.1)
    for step in range(3):
        x = inputs(step)
        engine.backward((engine(x) * 2 + engine(x[:1]).sqrt()).log())
        engine.step()
        optimizer.zero_grad()
        (plain(x) * 2 + plain(x[:1]).sqrt()).log().backward()
        optimizer.step()
    for name, value in full_masters(engine).items():
        torch.testing.assert_close(value, plain.get_parameter(name).data, rtol=1e-5, atol=1e-6)
