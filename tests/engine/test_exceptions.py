"""An exception in forward or backward costs that micro-batch, nothing else: the next steps are right."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import CallOrderError, DivergenceError
from deepspeed.utils import safe_get_full_grad
from deepspeed.zero import GatheredParameters
from tests.engine.support import engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import Tower, tower
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
        x = self.first(x.to(self.first.bias.dtype))
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


def _check(stage, accumulation, *failures):
    undisturbed = _train(stage, accumulation, None, "", False)
    for failing, where, own_backward in failures:
        assert_states_equal(_train(stage, accumulation, failing, where, own_backward), undisturbed)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_failed_micro_batch_leaves_nothing(stage, accumulation):
    """In step 2 the order of reductions is known, so half of the failed backward has been reduced already."""
    run_ranks(_check, 2, stage, accumulation, (2, "forward", False), (2, "backward", False))


@pytest.mark.parametrize("stage", [0, 3])
def test_also_in_the_first_step_and_with_the_users_own_backward(stage):
    run_ranks(_check, 2, stage, 1, (0, "backward", True), (2, "backward", True))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_earlier_micro_batches(stage, overlap):
    """The failed one never counts. Where its finished buckets are in the sum already, the sum starts from zero."""

    # What the first micro-batch left survives, unless a part of the failed one was added to it already.
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


def _train_with_a_failing_rank(stage, failing_micro, where, after, **config):
    """In step 2 rank 1 alone fails, and repeats its micro-batch or leaves it out. Masters after 4 steps."""
    torch.manual_seed(3)
    model = FusedTower()
    engine = engine_of(model, stage, accumulation=2, zero={**_ZERO, "reduce_bucket_size": 256}, **config)
    for step in range(4):
        for micro in range(2):
            fails = step == 2 and micro == failing_micro and rank() == 1
            if fails:
                _fail(engine, model, where, False)
            if not fails or after == "repeat":
                engine.backward(engine(inputs(step, micro, rank())))
            engine.step()
    return full_masters(engine)


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(2)
def test_one_rank_may_repeat_what_had_not_been_sent(stage):
    undisturbed = _train(stage, 2, None, "backward", False)
    assert_states_equal(_train_with_a_failing_rank(stage, 0, "backward", "repeat"), undisturbed)


def _one_rank_is_refused(*how, **config):
    with pytest.raises(DivergenceError) as caught:
        _train_with_a_failing_rank(*how, **config)
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_rank_cannot_repeat_what_others_have_a_part_in(stage):
    """All ranks raise: the sums and slices that the others wait for will never come. They waited for ever."""
    wheres = ("backward", "forward") if stage == 3 else ("backward",)
    for where in wheres:
        for text in run_ranks(_one_rank_is_refused, 2, stage, 1 if stage == 0 else 0, where, "repeat"):
            assert "ranks took different branches and wait for each other" in text
            if where == "backward":  # a failed forward has taken part in the rest of its gathers
                assert "rank 1 waits for agreement to continue after an exception in a backward, after " in text


def test_one_rank_that_leaves_a_micro_batch_out_is_found():
    """Also in 16 bit, where it has no sum of the dtype that the others send."""
    for text in run_ranks(_one_rank_is_refused, 2, 1, 0, "forward", "leave out", bf16={"enabled": True}):
        assert "different numbers of forwards and backwards" in text


@on_ranks(2)
def test_a_failure_inside_no_sync_keeps_what_was_reduced():
    """It throws away this rank's own sum at most, not what earlier micro-batches reduced."""
    model = FusedTower()
    engine = engine_of(model, 2, accumulation=4, zero={**_ZERO, "reduce_bucket_size": 256})
    for micro in range(2):  # the first one learns the order, so that later ones pack on the way
        engine.backward(engine(inputs(micro, rank())))
        engine.step()
    reduced = [safe_get_full_grad(parameter) for parameter in model.parameters()]
    with engine.no_sync():
        _fail(engine, model, "backward", False)
        engine(inputs(2, rank()))
    found = [safe_get_full_grad(parameter) for parameter in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(found, reduced, strict=True))


def _gather_all(engine, _folder):
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        pass


CALLS = {
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "load_checkpoint": lambda engine, folder: engine.load_checkpoint(folder, must_exist=True),
    "save_16bit_model": lambda engine, folder: engine.save_16bit_model(folder),
    "offload_states": lambda engine, _: (engine.offload_states(), engine.reload_states()),
    "step": lambda engine, _: engine.step(),
    "optimizer.step": lambda engine, _: engine.optimizer.step(),
    "zero_grad": lambda engine, _: engine.zero_grad(),
    "optimizer.zero_grad": lambda engine, _: engine.optimizer.zero_grad(),
    "iter_full": lambda engine, _: list(engine.iter_full()),
    "safe_get_full_grad": lambda engine, _: [safe_get_full_grad(p) for p in engine.module.parameters()],
    "GatheredParameters": _gather_all,
}


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_any_call_may_come_after_a_failed_backward(stage, tmp_path):
    """A failed backward before every step, with another call between the two; none of them is in the result."""
    folder = str(tmp_path)

    def train(calls):
        torch.manual_seed(3)
        model = FusedTower()
        zero = {**_ZERO, "reduce_bucket_size": 256, "stage3_gather_16bit_weights_on_model_save": True}
        engine = engine_of(model, stage, zero=zero)
        for number, name in enumerate(CALLS):
            if calls:
                _fail(engine, model, "backward", own_backward=number % 2 == 1)
                assert engine._runtime.in_backward
                CALLS[name](engine, folder)
                assert not engine._runtime.in_backward, name
                assert number == 0 or all(b.state.value == "sharded" for b in engine._runtime.buckets if b.is_sharded)
            engine.backward(engine(inputs(number, rank())))
            engine.step()
            if number == 0:
                engine.save_checkpoint(folder)  # which the second call loads
        return full_masters(engine)

    assert_states_equal(train(True), train(False))


@on_ranks(2)
def test_a_save_after_one_rank_alone_failed_is_refused_everywhere(tmp_path):
    folder = str(tmp_path)
    engine = engine_of(model := FusedTower(), 3, zero=_ZERO)
    engine.backward(engine(inputs(0, rank())))
    engine.step()
    with pytest.raises(DivergenceError, match="agreement to continue after an exception"):
        if rank() == 1:
            _fail(engine, model, "backward", False)
            engine.save_checkpoint(folder)
        else:
            engine.backward(engine(inputs(99, rank())))


@on_ranks(1)
def test_calls_inside_a_backward_are_refused(tmp_path):
    """What runs is not dropped, and a forward in it is recomputation, through the engine too."""
    folder = str(tmp_path)
    engine, plain = engine_of(tower(), 3), tower()
    refused = []

    def call(_gradient):
        for name in ("save_checkpoint", "step", "optimizer.step", "zero_grad", "offload_states"):
            with pytest.raises(CallOrderError, match="a backward is still running"):
                CALLS[name](engine, folder)
            refused.append(name)

    x = inputs(0).requires_grad_()
    x.register_hook(call)
    engine.backward(checkpoint(engine, x, use_reentrant=False))
    assert len(refused) == 5
    plain(inputs(0)).backward()
    for name, parameter in engine.module.named_parameters():
        assert_states_equal(safe_get_full_grad(parameter), plain.get_parameter(name).grad)


def test_the_tower_without_fuse_is_the_tower():
    torch.manual_seed(3)
    model = FusedTower()
    assert model(inputs(0)) == tower()(inputs(0))
