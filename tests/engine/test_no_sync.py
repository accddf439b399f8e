"""no_sync at every stage: nothing travels inside, and the result is that of reducing each micro-batch."""

import pytest
import torch

from deepspeed.comm.base.counters import counted
from deepspeed.errors import CallOrderError
from tests.engine.support import engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters


def _train(stage, inside, accumulation=3, **config):
    engine = engine_of(tower(), stage, accumulation=accumulation, **config)
    silent = []
    for step in range(2):
        for micro in range(accumulation):
            loss = engine(inputs(step, micro, rank()))
            if inside and micro < accumulation - 1:
                with counted() as traffic, engine.no_sync():
                    engine.backward(loss)
                silent.append(sum(t.nbytes for name, t in traffic.requested.items() if "reduce" in name))
            else:
                engine.backward(loss)
            engine.step()
    return full_masters(engine), silent


def _compare(stage):
    plain, _ = _train(stage, False)
    quiet, silent = _train(stage, True)
    assert len(silent) == 4 and not any(silent), silent
    exact = stage < 2  # stages 0 and 1 add up micro-batches before ranks anyway
    assert_states_equal(quiet, plain, rtol=0 if exact else 2e-5, atol=0 if exact else 1e-6)
    return quiet


@on_ranks(2)
def test_equal_to_reducing_each_micro_batch_and_the_same_bits_at_every_stage():
    results = [_compare(stage) for stage in range(4)]
    for other in results[1:]:
        assert_states_equal(other, results[0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_the_step_reduces_what_no_backward_did(stage):
    """Even the boundary's backward may be inside: the step reduces what is left."""
    plain, _ = _train(stage, False, accumulation=1)
    engine = engine_of(tower(), stage)
    for step in range(2):
        loss = engine(inputs(step, 0, rank()))
        with engine.no_sync():
            engine.backward(loss)
        engine.step()
    assert_states_equal(full_masters(engine), plain)


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_reduction_by_hand(stage):
    engine = engine_of(tower(), stage)
    engine.enable_backward_allreduce = False
    plain, _ = _train(stage, False, accumulation=1)
    for step in range(2):
        engine.backward(engine(inputs(step, 0, rank())))
        engine.allreduce_gradients()
        engine.step()
    assert_states_equal(full_masters(engine), plain)


@on_ranks(2)
def test_gradients_from_inside_count_where_the_last_backward_has_none():
    """A parameter that has a gradient only inside no_sync is updated as well."""
    engine = engine_of(tower(), 2, accumulation=2)
    for micro in range(2):
        x = inputs(0, micro, rank())
        if micro == 0:
            with engine.no_sync():
                engine.backward(engine(x))
        else:
            engine.backward(engine.module.last(x).square().mean())
        engine.step()
    weights = full_masters(engine)
    moved = {name: not torch.equal(weights[name], p) for name, p in tower().named_parameters()}
    assert all(moved.values()), moved


@on_ranks(2)
def test_nesting_is_refused():
    engine = engine_of(tower(), 1)
    with engine.no_sync(), pytest.raises(CallOrderError, match="nest"), engine.no_sync():
        raise AssertionError("not reached")
