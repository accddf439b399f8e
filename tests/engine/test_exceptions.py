"""An exception in forward or backward costs that micro-batch, nothing else: the next steps are right."""

from __future__ import annotations

import pytest
import torch

from tests.engine.support import Tower, engine_of, inputs, rank, tower
from tests.harness import assert_states_equal, run_ranks
from tests.zero.reading import full_masters


class _Fuse(torch.autograd.Function):
    """Identity whose backward raises while the fuse is armed."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if _Fuse.armed:
            raise RuntimeError("the fuse has blown")
        return gradient


class FusedTower(Tower):
    """Raises on request: in the middle of forward, or in the middle of backward."""

    fails_forward = False

    def forward(self, x):
        x = self.first(x)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                if self.fails_forward:
                    raise RuntimeError("the forward has failed")
                x = _Fuse.apply(x)
        return self.last(x).float().square().mean()


def _train(stage, accumulation, failing, where, own_backward):
    """Masters after 4 steps; in step ``failing`` the first micro-batch fails once and is repeated."""
    torch.manual_seed(3)
    model = FusedTower()
    engine = engine_of(model, stage, accumulation=accumulation, zero={**_ZERO, "reduce_bucket_size": 256})
    for step in range(4):
        for micro in range(accumulation):
            if step == failing and micro == 0:
                _fail(engine, model, where, own_backward)
            loss = engine(inputs(step, micro, rank()))
            engine.backward(loss)
            engine.step()
    return full_masters(engine)


_ZERO = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 300,
    "stage3_max_reuse_distance": 0,
    "overlap_comm": True,
}


def _fail(engine, model, where, own_backward):
    model.fails_forward, _Fuse.armed = where == "forward", where == "backward"
    try:
        loss = engine(inputs(99, rank()))
        if own_backward:
            loss.backward()
        else:
            engine.backward(loss)
    except RuntimeError as error:
        assert "failed" in str(error) or "blown" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    finally:
        model.fails_forward = _Fuse.armed = False


def _check(stage, accumulation, failing, where, own_backward):
    undisturbed = _train(stage, accumulation, None, where, own_backward)
    assert_states_equal(_train(stage, accumulation, failing, where, own_backward), undisturbed)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_failed_micro_batch_leaves_nothing(stage, accumulation, where):
    """In step 2 the order of reductions is known, so half of the failed backward has been reduced already."""
    run_ranks(_check, 2, stage, accumulation, 2, where, False)


@pytest.mark.parametrize("stage", [0, 3])
def test_also_in_the_first_step_and_with_the_users_own_backward(stage):
    run_ranks(_check, 2, stage, 1, 0, "backward", True)
    run_ranks(_check, 2, stage, 1, 2, "backward", True)


def _fail_in_the_second_micro_batch(stage, overlap):
    """What the first micro-batch left survives, unless a part of the failed one was added to it already."""

    def train(what):
        torch.manual_seed(3)
        model = FusedTower()
        engine = engine_of(model, stage, accumulation=2, zero={**_ZERO, "overlap_comm": overlap})
        for step in range(3):
            for micro in range(2):
                if what == "fails" and micro == 1:
                    _fail(engine, model, "backward", False)
                knows_order = step > 0 or stage >= 2  # those stages reduce, and learn the order, in every micro-batch
                if not (what == "loses the first" and micro == 0 and knows_order):
                    engine.backward(engine(inputs(step, micro, rank())))
                engine.step()
        return full_masters(engine)

    found, whole = train("fails"), train("goes well")
    if overlap and not torch.equal(found["last.weight"], whole["last.weight"]):
        # As long as the order of reductions is not known, nothing is added before the backward ends.
        assert_states_equal(found, train("loses the first"))
    else:
        assert_states_equal(found, whole)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_earlier_micro_batches(stage, overlap):
    """The failed one never counts. Where its finished buckets are in the sum already, the sum starts from zero."""
    run_ranks(_fail_in_the_second_micro_batch, 2, stage, overlap)


def _step_after_failure():
    model = FusedTower()
    engine = engine_of(model, 2)
    engine.backward(engine(inputs(0, rank())))
    engine.step()
    _fail(engine, model, "backward", False)
    before = full_masters(engine)
    with pytest.raises(RuntimeError, match="backward"):
        engine.step()
    assert_states_equal(full_masters(engine), before)


def test_a_step_after_a_failed_backward_is_refused():
    run_ranks(_step_after_failure, 2)


def test_the_tower_without_fuse_is_the_tower():
    torch.manual_seed(3)
    model = FusedTower()
    assert model(inputs(0)) == tower()(inputs(0))
