"""The order of forwards, backwards and updates; exceptions and evaluation between them."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.config.batch import BatchSizes
from deepspeed.engine.batches import Batches
from deepspeed.engine.loss_scaling import LossScaling
from deepspeed.engine.train_step import TrainStep
from deepspeed.engine_feature import EngineHooks
from deepspeed.errors import CallOrderError, DivergenceError
from deepspeed.utils import safe_get_full_grad
from deepspeed.zero import GatheredParameters
from deepspeed.zero.gradient.program_gradients import DiscardReport
from deepspeed.zero.passes import ModelPhase, Pass, PassTracker
from deepspeed.zero.runtime import MicroBatch
from deepspeed.zero.update.step_agreement import StepExchange
from deepspeed.zero.update.updater import StepReport
from tests.engine.support import engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.cases import Plain
from tests.harness.toy_models import Tower, tower
from tests.zero.reading import full_masters

# ``engine.train_step``: the order of calls in a forward, a backward and an update, with a runtime that notes them.


class FakeRuntime:
    """Notes what a step asks of a ZeRO runtime."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.micro_batches: list[MicroBatch] = []
        self.synced: list[bool] = []
        self.backward_is_running = self.is_destroyed = False
        self.passes = PassTracker()
        self.reducer: Any = SimpleNamespace(
            has_sums=False,
            has_arrivals=True,
            discards=0,
            settle=lambda: self.calls.append("settle"),
            zero_grad=lambda: self.calls.append("zero_grad"),
            program=SimpleNamespace(apply=lambda: None, take_discards=DiscardReport),
            end_micro_step=lambda: self.calls.append("end of micro-step"),
            clear=lambda: self.calls.append("clear"),
        )
        self.hooks = SimpleNamespace(
            sees_forwards=False,
            pause=lambda: self.calls.append("pause hooks"),
            watch=lambda outputs: self.calls.append("watch outputs"),
        )
        self.originals = SimpleNamespace(restore=lambda: None)
        self.updater: Any = None

    @property
    def in_backward(self) -> bool:
        return self.passes.in_backward

    def begin_backward(self, micro_batch: MicroBatch, *, sync: bool, unit: Any, is_by_program: bool) -> None:
        self.micro_batches.append(micro_batch)
        self.synced.append(sync)
        self.passes.begin(ModelPhase.BACKWARD).is_by_program = is_by_program

    def end_backward(self) -> Pass:
        ended = self.passes.current
        assert ended is not None
        self.passes.end()
        self.calls.append("end of backward")
        return ended

    def leave_backward(self, call: str) -> None:
        if self.in_backward:
            raise CallOrderError(f"{call}: a backward is still running")

    def __getattr__(self, name: str) -> Any:  # refuse_offloaded, drop_open_work, free_gathered and the like
        return lambda *_arguments, **_named: None


class FakeProgress:
    """Notes phases and losses."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.losses: list[float] = []

    def before(self, phase: str) -> None:
        self.phases.append(f"before {phase}")

    def after(self, phase: str) -> None:
        self.phases.append(f"after {phase}")

    def inputs(self, positional: Any, named: Any) -> None:
        pass

    def counting(self, model: Any) -> Any:
        return nullcontext()

    def loss(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss.detach()))


class FakeHooks(EngineHooks):
    """Adds a keyword to each forward and records the updates, as a feature does."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, bool]] = []

    def before_forward(self, **facts: Any) -> dict[str, Any]:
        return {"factor": 3.0} if facts["is_training"] else {}

    def after_update(self, global_steps: int, *, was_skipped: bool) -> None:
        self.updates.append((global_steps, was_skipped))


class FakeUpdater:
    """Reports overflows as they are asked for."""

    def __init__(self) -> None:
        self.overflows: list[bool] = []
        self.extras: list[list[float]] = []

    def exchange(self, extra: Any) -> StepExchange:
        self.extras.append(list(extra))
        return StepExchange(1.0, [], torch.tensor([list(extra)], dtype=torch.float64))

    def apply(self, exchanged: StepExchange, divisor: float) -> StepReport:
        overflow = self.overflows.pop() if self.overflows else False
        return StepReport(1.0, overflow, exchanged.extra)


class Made:
    """A training step on fakes."""

    def __init__(self, accumulation: int = 2, *, trains: bool = True, scaler: Any = None) -> None:
        self.runtime, self.progress, self.hooks = FakeRuntime(), FakeProgress(), FakeHooks()
        self.updater = self.runtime.updater = FakeUpdater() if trains else None
        self.batches = Batches(BatchSizes(4 * accumulation, 4, accumulation), 1, is_counted=True)
        parts: Any = (self.runtime, self.batches, LossScaling(scaler), self.progress)
        precision: Any = SimpleNamespace(cast_inputs=False, compute_dtype=None, forward_context=lambda _: nullcontext())
        self.step = TrainStep(*parts, precision=precision, hooks=self.hooks)
        self.weight = torch.tensor(1.0, requires_grad=True)

    def loss(self) -> torch.Tensor:
        return self.step.forward(
            lambda x, factor=1.0: (x * self.weight * factor).sum(), (torch.ones(4),), {}, is_training=True
        )


def test_a_forward_gets_the_keywords_of_features_and_announces_its_backward():
    made = Made()
    assert made.loss().item() == 12.0
    assert made.runtime.calls == ["watch outputs"]
    assert made.progress.phases == ["before forward", "after forward"]
    outputs = made.step.forward(lambda x: x + made.weight, (torch.ones(4),), {}, is_training=False, announces=False)
    assert outputs.tolist() == [2.0] * 4
    assert made.runtime.calls == ["watch outputs"]


def test_losses_are_divided_by_the_accumulation_steps():
    made = Made(accumulation=2)
    loss = made.step.backward_of_loss(made.loss())
    assert loss.item() == 6.0 and made.progress.losses == [6.0]
    assert made.weight.grad is not None and made.weight.grad.item() == 6.0
    assert made.runtime.micro_batches == [MicroBatch(0, is_first=True, is_last=False)]
    made.step.backward_of_loss(made.loss(), divides=False)
    assert made.weight.grad.item() == 18.0
    assert made.runtime.calls.count("end of backward") == 2


def test_gradients_of_another_part_are_neither_scaled_nor_reported():
    made = Made()
    outputs = made.weight * torch.ones(3)
    current = MicroBatch(1, is_first=False, is_last=True)
    made.step.backward([outputs, outputs * 2], [torch.ones(3), None], current)
    assert made.weight.grad is not None and made.weight.grad.item() == 3.0
    assert made.progress.losses == [] and made.runtime.micro_batches == [current]
    assert made.batches.is_gradient_accumulation_boundary()


def test_a_schedule_may_not_begin_an_update_twice():
    made = Made()
    made.runtime.reducer.has_sums = True
    with pytest.raises(CallOrderError, match="micro-batch 0 is marked as the first"):
        made.step.backward_of_loss(made.loss(), MicroBatch(0, is_first=True, is_last=False))
    assert made.runtime.micro_batches == []


def test_a_backward_of_the_program_opens_and_closes_itself():
    made = Made()
    loss = made.step.scale(made.loss())
    loss.register_hook(lambda _gradient: made.runtime.passes.open_backward())
    loss.backward()
    assert made.runtime.calls[-1] == "end of backward" and not made.runtime.in_backward
    assert made.progress.phases[-2:] == ["before backward", "after backward"]


def test_an_exception_in_a_backward_leaves_it_open_for_the_runtime():
    made = Made()

    def fail() -> None:
        raise ValueError("in the midst")

    with pytest.raises(ValueError, match="in the midst"):
        made.step.run_backward(fail, MicroBatch(0, is_first=True, is_last=True))
    assert made.runtime.in_backward and "after backward" not in made.progress.phases


def test_updates_come_at_the_boundary():
    made = Made(accumulation=2)
    reports = []
    for _ in range(4):
        made.step.backward_of_loss(made.loss())
        reports.append(made.step.update())
    assert [report is not None for report in reports] == [False, True, False, True]
    assert made.runtime.calls.count("end of micro-step") == 2
    assert (made.batches.global_steps, made.batches.global_samples, made.batches.micro_steps) == (2, 16, 4)
    assert made.hooks.updates == [(1, False), (2, False)]


def test_a_skipped_update_is_counted():
    made = Made(accumulation=1)
    assert made.updater is not None
    made.updater.overflows = [True]
    made.step.backward_of_loss(made.loss())
    made.step.update()
    assert (made.batches.global_steps, made.batches.skipped_steps, made.step.was_applied) == (1, 1, False)
    assert made.hooks.updates == [(1, True)]


def test_a_schedule_updates_once_for_all_its_micro_batches():
    made = Made(accumulation=3)
    report = made.step.update(extra=[1.0, 0.5], micro_batches=3)
    assert report is not None and report.extra.tolist() == [[1.0, 0.5]]
    assert made.batches.micro_steps == 3 and made.batches.global_samples == 12
    assert made.batches.micro_batch() == MicroBatch(0, is_first=True, is_last=False)


def test_calls_that_are_refused():
    untrained = Made(trains=False)
    untrained.runtime.reducer = None
    for call in (lambda: untrained.step.update(), lambda: untrained.step.backward_of_loss(untrained.loss())):
        with pytest.raises(CallOrderError, match="no optimizer"):
            call()
    made = Made()
    with pytest.raises(CallOrderError, match="does not require a gradient"):
        made.step.backward_of_loss(torch.ones(()))
    with torch.no_grad(), pytest.raises(CallOrderError, match=r"gradients are off .* torch\.set_grad_enabled\(True\)"):
        made.step.backward_of_loss(made.loss())
    with made.step.unreduced():
        made.step.backward_of_loss(made.loss())
        assert made.runtime.synced == [False]
        with pytest.raises(CallOrderError, match="inside no_sync"):
            made.step.update()
    made.runtime.is_destroyed = True
    for call in (lambda: made.step.update(), lambda: made.step.backward_of_loss(made.loss())):
        with pytest.raises(CallOrderError, match="was destroyed"):
            call()


def test_gradients_of_an_unscaled_loss_are_thrown_away():
    scaler = SimpleNamespace(loss_scale=8.0, scale_loss=lambda loss: loss * 8.0)
    made = Made(scaler=scaler)
    loss = made.loss()
    loss.register_hook(lambda _gradient: made.runtime.passes.open_backward())
    loss.backward()
    with pytest.raises(CallOrderError, match="was not scaled"):
        made.step.free_for_update()
    assert "clear" in made.runtime.calls
    made.step.free_for_update()  # once
    assert made.step.backward_of_loss(made.loss()).item() == 6.0


# An exception in forward or backward costs that micro-batch, nothing else: the next steps are right.


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
def test_any_call_may_come_after_a_failed_backward(stage, folder):
    """A failed backward before every step, with another call between the two; none of them is in the result."""

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
def test_a_save_after_one_rank_alone_failed_is_refused_everywhere(folder):
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
def test_calls_inside_a_backward_are_refused(folder):
    """What runs is not dropped, and a forward in it is recomputation, through the engine too."""
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


# A backward through values that have changed since their forward is an error, as with plain torch.


LIMITS = ({}, {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0})


@on_ranks(2)
def test_a_backward_after_the_update_of_its_weights():
    for stage, zero in ((0, {}), (2, {}), *((3, limits) for limits in LIMITS)):
        engine = engine_of(tower(), stage, zero=zero)
        for _ in range(2):
            early = engine(inputs(0, rank()))
            engine.backward(engine(inputs(1, rank())))
            engine.step()
            with pytest.raises(RuntimeError, match=r"changed since|modified by an inplace operation"):
                engine.backward(early)
        engine.backward(engine(inputs(2, rank())))  # the engine is as good as before
        engine.step()
        early = engine(inputs(3, rank()))
        engine.backward(early, retain_graph=True)  # twice through the same graph, as nothing has changed
        engine.backward(early)
        engine.step()
        engine.destroy()


# A whole training step inside the engine's forward, as Lightning's manual optimization runs it.


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


def _train_step_inside_forward(engine, inside, calls):
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
        expected = _train_step_inside_forward(outside, inside=False, calls="root")
        for calls in ("root", "method"):
            engine = _engine(stage)
            assert _train_step_inside_forward(engine, inside=True, calls=calls) == expected, (stage, calls)
            assert_states_equal(_weights(engine), _weights(outside))


@on_ranks(2)
def test_an_exception_after_the_inner_backward_leaves_a_usable_engine():
    engine, undisturbed = _engine(3), _engine(3)
    expected = _train_step_inside_forward(undisturbed, inside=True, calls="root")

    def fails_after_backward(x):
        engine.backward(engine.module(x).square().mean())
        raise RuntimeError("in the user's step")

    engine.module.step = fails_after_backward
    with pytest.raises(RuntimeError, match="in the user's step"):
        engine(_batch(0))
    engine.zero_grad()
    assert _train_step_inside_forward(engine, inside=True, calls="root") == expected


# Forwards without gradients between, and in the middle of, training steps change nothing.


LIMITS_EVALUATION = [
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


def _train_evaluation(stage, how, zero, accumulation=2):
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
    for zero in LIMITS_EVALUATION if stage == 3 else LIMITS_EVALUATION[:1]:
        plain, _ = _train_evaluation(stage, None, zero)
        for how in ("no_grad", "inference_mode", "eval", "module", "thrown away"):
            disturbed, values = _train_evaluation(stage, how, zero)
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
    engine, plain = engine_of(tower(), stage), Plain(tower)
    for step in range(3):
        x = inputs(step)
        engine.backward((engine(x) * 2 + engine(x[:1]).sqrt()).log())
        engine.step()
        plain.step(lambda model, _, x=x: (model(x) * 2 + model(x[:1]).sqrt()).log())
    plain.assert_masters(engine)
