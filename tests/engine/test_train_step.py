"""``engine.train_step``: the order of calls in a forward, a backward and an update, with a runtime that notes them."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.config.batch import BatchSizes
from deepspeed.engine.batches import Batches
from deepspeed.engine.loss_scaling import LossScaling
from deepspeed.engine.train_step import TrainStep
from deepspeed.engine_feature import EngineHooks
from deepspeed.errors import CallOrderError
from deepspeed.zero.gradient.program_gradients import DiscardReport
from deepspeed.zero.passes import ModelPhase, Pass, PassTracker
from deepspeed.zero.runtime import MicroBatch
from deepspeed.zero.update.step_agreement import StepExchange
from deepspeed.zero.update.updater import StepReport


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
