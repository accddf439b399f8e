"""The phases of a model (``zero.passes``), and what is left of a pass that has ended or failed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed.errors import CallOrderError
from deepspeed.zero.gather.schedule import GatherLimits
from deepspeed.zero.passes import NEXT, ModelPhase, Pass, PassTracker, Scope
from deepspeed.zero.runtime import MicroBatch
from tests.harness.loopback import LoopbackTransport, run_threads
from tests.zero.alone import Rank, batch, rank_of

KEEPING = GatherLimits(prefetch=10**6, max_live=10**6, max_reuse_distance=10**6)


def _passes(phase: ModelPhase) -> PassTracker:
    made = PassTracker()
    if phase is ModelPhase.PAUSED:
        made.paused.append(Scope(0, []))
    elif phase is not ModelPhase.IDLE:
        made.begin(phase)
    assert made.phase is phase
    return made


@pytest.mark.parametrize("before", ModelPhase)
@pytest.mark.parametrize("phase", [ModelPhase.FORWARD, ModelPhase.EVALUATION, ModelPhase.BACKWARD])
def test_a_pass_begins_only_where_the_table_allows_it(before: ModelPhase, phase: ModelPhase) -> None:
    passes = _passes(before)
    if phase in NEXT[before]:
        assert passes.begin(phase, 3) == Pass(phase, 3) == passes.current and passes.phase is phase
    else:
        with pytest.raises(RuntimeError, match=f"a phase that {phase.value} may follow, found {before}"):
            passes.begin(phase)


def _fail(*_: Any) -> None:
    raise ArithmeticError


def _in_forward(rank: Rank) -> None:
    with rank.runtime.passes.in_call():
        hook = rank.model.blocks[1].register_forward_pre_hook(_fail)
        try:
            rank.model(batch(0))
        finally:
            hook.remove()


def _in_backward(rank: Rank) -> None:
    loss = rank.model(batch(0))
    hook = rank.model.blocks[1].up.weight.register_hook(_fail)
    try:
        rank.backward(loss)
    finally:
        hook.remove()


def _in_recomputation(rank: Rank) -> None:
    first = [True]

    def second_time(*_: Any) -> None:
        if not first.pop():
            raise ArithmeticError
        first.append(False)

    hook = rank.model.blocks[1].register_forward_hook(second_time)
    try:
        loss = torch.utils.checkpoint.checkpoint(rank.model, batch(0), use_reentrant=False)
        rank.backward(loss)
    finally:
        hook.remove()


@pytest.mark.parametrize("fails", [_in_forward, _in_backward, _in_recomputation])
@pytest.mark.parametrize("stage", [1, 3])
def test_an_exception_drops_the_pass_and_nothing_else(stage: int, fails: Callable[[Rank], None]) -> None:
    def body(transport: LoopbackTransport) -> None:
        rank = rank_of(transport, stage, gathers=KEEPING)
        passes = rank.runtime.passes
        rank.step(rank.model(batch(0)))
        with pytest.raises(ArithmeticError):
            fails(rank)
        assert rank.runtime.drop_open_work() == (fails is not _in_forward)
        assert passes.current is None and passes.phase is ModelPhase.IDLE and not passes.paused and not passes.calls
        assert all(bucket.users == 0 for bucket in rank.runtime.buckets)
        assert not rank.runtime.drop_open_work()
        rank.optimizer.zero_grad()
        rank.step(rank.model(batch(1)))
        assert passes.phase is ModelPhase.IDLE

    run_threads(body, 2)


def test_one_object_holds_what_a_backward_gathers_and_reduces() -> None:
    def body(transport: LoopbackTransport) -> None:
        rank = rank_of(transport, 3)
        passes, seen = rank.runtime.passes, []
        rank.model.head.weight.register_hook(lambda _gradient: seen.append(passes.current))
        for _ in range(2):
            rank.step(rank.model(batch(0)))
        first, second = seen
        assert first is not second and first.phase is second.phase is ModelPhase.BACKWARD and first.reached == {0}
        assert first.is_learned and not second.is_learned and second.order == second.issued == first.issued
        assert first.reductions is None and passes.current is None

    run_threads(body, 2)


def test_a_backward_inside_a_backward_is_refused_and_the_outer_one_stays_open() -> None:
    def body(transport: LoopbackTransport) -> None:
        rank = rank_of(transport, 1)
        rank.runtime.begin_backward(MicroBatch(0, True, True), sync=True)
        outer = rank.runtime.passes.current
        with pytest.raises(RuntimeError, match="no open backward"):
            rank.runtime.begin_backward(MicroBatch(0, True, True), sync=True)
        assert rank.runtime.passes.current is outer
        rank.runtime.end_backward()
        with pytest.raises(RuntimeError, match="an open backward"):
            rank.runtime.end_backward()

    run_threads(body, 1)


def test_a_call_inside_a_backward_names_itself() -> None:
    def body(transport: LoopbackTransport) -> None:
        rank = rank_of(transport, 1)

        def call(_gradient: torch.Tensor) -> None:
            with pytest.raises(CallOrderError, match="engine.step: a backward is still running"):
                rank.runtime.leave_backward("engine.step")

        rank.model.head.weight.register_hook(call)
        rank.step(rank.model(batch(0)))

    run_threads(body, 1)
