"""When a micro-step ends in an update: accumulation, the override, the optimizer's own step, zero_grad."""

import pytest
import torch

from deepspeed.errors import CallOrderError
from tests.engine.support import adamw, engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters


def _reference(micro_batches, ranks, divide_by):
    """Weights after one AdamW step per list of micro-batches; gradients added over them, averaged over ranks."""
    model = tower()
    optimizer = adamw(model)
    for step in micro_batches:
        optimizer.zero_grad()
        for position in step:
            for r in range(ranks):
                (model(inputs(*position, r)) / divide_by / ranks).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _assert_close(engine, expected):
    assert_states_equal(full_masters(engine), expected, rtol=2e-5, atol=1e-6)


def _accumulate(stage):
    engine = engine_of(tower(), stage, accumulation=3)
    boundaries = []
    for step in range(2):
        for micro in range(3):
            loss = engine(inputs(step, micro, rank()))
            returned = engine.backward(loss)
            torch.testing.assert_close(returned, loss / 3)
            boundaries.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            assert engine.was_step_applied() is boundaries[-1]
    assert boundaries == [False, False, True] * 2
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (2, 6, 0)
    assert engine.global_samples == 2 * 2 * 3 * 2
    _assert_close(engine, _reference([[(0, m) for m in range(3)], [(1, m) for m in range(3)]], 2, 3))


def _override(stage):
    """The caller decides; the accumulation steps of the configuration only divide."""
    engine = engine_of(tower(), stage, accumulation=2)
    for step in range(2):
        for micro in range(3):
            engine.set_gradient_accumulation_boundary(micro == 2)
            engine.backward(engine(inputs(step, micro, rank())))
            engine.step()
    assert engine.global_steps == 2
    _assert_close(engine, _reference([[(0, m) for m in range(3)], [(1, m) for m in range(3)]], 2, 2))


def _boundary_after_backward(stage):
    """The boundary is declared only after the backward: what was kept locally is reduced at the step."""
    engine = engine_of(tower(), stage, accumulation=1)
    for step in range(2):
        for micro in range(2):
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(engine(inputs(step, micro, rank())))
            engine.set_gradient_accumulation_boundary(micro == 1)
            engine.step()
    _assert_close(engine, _reference([[(0, 0), (0, 1)], [(1, 0), (1, 1)]], 2, 1))


def _undivided(stage):
    engine = engine_of(tower(), stage, accumulation=2)
    for micro in range(2):
        engine.backward(engine(inputs(0, micro, rank())), scale_wrt_gas=False)
        engine.step()
    _assert_close(engine, _reference([[(0, 0), (0, 1)]], 2, 1))


def _own_step(stage):
    """As Lightning Fabric drives it: engine.backward, then the returned optimizer's own step."""
    engine = engine_of(tower(), stage, gradient_clipping=1e9)
    for step in range(3):
        engine.backward(engine(inputs(step, rank())))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert engine.optimizer.overflow is False
    _assert_close(engine, _reference([[(s,)] for s in range(3)], 2, 1))


def _zero_grad(stage):
    """Whatever was accumulated before zero_grad does not count."""
    engine = engine_of(tower(), stage, accumulation=2)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(inputs(5, rank())))
    engine.step()
    engine.zero_grad()
    for micro in range(2):
        engine.set_gradient_accumulation_boundary(micro == 1)
        engine.backward(engine(inputs(0, micro, rank())))
        engine.step()
    _assert_close(engine, _reference([[(0, 0), (0, 1)]], 2, 2))


def _unmanaged(stage):
    """managed_gradient_accumulation false: every call of step is an update, whatever the accumulation steps say."""
    engine = engine_of(tower(), stage, accumulation=2, managed_gradient_accumulation=False)
    for step in range(2):
        for micro in range(2):
            engine.backward(engine(inputs(step, micro, rank())))
        engine.step()
    assert engine.global_steps == 2
    _assert_close(engine, _reference([[(0, 0), (0, 1)], [(1, 0), (1, 1)]], 2, 2))


def _changed_batch(stage):
    engine = engine_of(tower(), stage)
    engine.set_train_batch_size(8)
    assert engine.gradient_accumulation_steps() == 2
    assert engine.get_batch_info() == (8, 2, 2)
    for micro in range(2):
        engine.backward(engine(inputs(0, micro, rank())))
        engine.step()
    assert engine.global_steps == 1
    _assert_close(engine, _reference([[(0, 0), (0, 1)]], 2, 2))


def _closure(stage):
    engine = engine_of(tower(), stage)

    def closure():
        loss = engine(inputs(0, rank()))
        engine.backward(loss)
        return loss

    assert engine.optimizer.step(closure).shape == ()
    _assert_close(engine, _reference([[(0,)]], 2, 1))


BODIES = [
    _accumulate,
    _override,
    _boundary_after_backward,
    _undivided,
    _own_step,
    _zero_grad,
    _unmanaged,
    _changed_batch,
    _closure,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
@on_ranks(2)
def test_at_every_stage(body):
    for stage in range(4):
        body(stage)


@on_ranks(2)
def test_misuse_is_named_and_harmless():
    engine = engine_of(tower(), 3)
    with pytest.raises(CallOrderError, match="shape"):
        engine.backward(engine(inputs(0)).reshape(1) * torch.ones(3))
    with pytest.raises(CallOrderError, match="no_sync"), engine.no_sync():
        engine.step()
    engine.backward(engine(inputs(0)))
    engine.step()
    assert engine.global_steps == 1
