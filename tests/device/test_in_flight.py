"""How much is on its way at stage 3 on a device that lags behind its host: gathers ahead of use, and reductions."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.axes import DATA
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports import native
from deepspeed.plan.decoder import Decoder
from deepspeed.plan.environment import SimulatedJob
from deepspeed.zero.gather import schedule
from deepspeed.zero.gradient import gradients
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind
from tests.device.support import batch, engine_at, step
from tests.engine.support import WIDTH, engine_of
from tests.harness.device import simulated_device
from tests.harness.toy_models import tower
from tests.plan.cells import SAMPLES, SHAPE, TOKENS, Cell

LAYER = 512  # elements of a layer's bucket
NOTHING_KEPT = {"stage3_max_reuse_distance": 0, "reduce_bucket_size": 5_000}
# Elements: one, half a unit, one unit, the default.
LIMITS = [1, LAYER // 2, LAYER, 50_000_000]


@contextmanager
def _gathers_counted(engine: Any) -> Iterator[dict[str, int]]:
    """Counts the gathers that were asked for when their values were needed, and all of them."""
    counts = {"late": 0, "all": 0}
    own = engine._runtime.schedule
    issue, issue_up_to = own._issue, own._issue_up_to

    def counting_issue(*arguments: Any) -> None:
        counts["all"] += 1
        issue(*arguments)

    def counting_issue_up_to(*arguments: Any) -> None:
        counts["late"] += 1
        issue_up_to(*arguments)

    with mock.patch.multiple(own, _issue=counting_issue, _issue_up_to=counting_issue_up_to):
        yield counts


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("limit", LIMITS)
def test_few_reductions_are_in_flight_and_the_next_unit_is_gathered_ahead(limit: int, accumulation: int) -> None:
    zero = {"stage3_prefetch_bucket_size": limit, **NOTHING_KEPT}
    with simulated_device(ranks=2):
        engine = engine_at(3, model=tower(depth=12), accumulation=accumulation, zero=zero)
        memory_tracker, buckets = engine._runtime.memory_tracker, engine._runtime.buckets
        assert max(bucket.layout.numel for bucket in buckets) == LAYER
        whole = sum(bucket.layout.numel * bucket.dtype.itemsize for bucket in buckets)
        for number in range(3):
            memory_tracker.reset_peak()  # in the first step too, whose orders are not known
            with _gathers_counted(engine) as counts:
                step(engine, number)
            peak = memory_tracker.peak(StorageKind.GRADIENT_BUCKET)
            assert peak <= 3 * LAYER * 2 and peak <= 0.3 * whole
        assert counts["all"] >= 24 * accumulation
        assert counts["all"] - counts["late"] >= 0.9 * counts["all"]
        engine.destroy()


@pytest.mark.parametrize("limit", LIMITS)
def test_nothing_is_gathered_ahead_beyond_the_limit_of_live_parameters(limit: int) -> None:
    zero = {"stage3_prefetch_bucket_size": limit, "stage3_max_live_parameters": 2 * LAYER - 1, **NOTHING_KEPT}
    with simulated_device(ranks=2):
        engine = engine_at(3, model=tower(depth=4), zero=zero)
        for number in range(3):
            engine._runtime.memory_tracker.reset_peak()
            step(engine, number)
        assert (
            engine._runtime.memory_tracker.peak(StorageKind.GATHERED) <= 2 * LAYER * 2
        )  # the end of one unit, the start of the next
        engine.destroy()


def test_zero_gathers_nothing_ahead() -> None:
    with simulated_device(ranks=2):
        engine = engine_at(3, model=tower(depth=4), zero={"stage3_prefetch_bucket_size": 0, **NOTHING_KEPT})
        for number in range(2):
            with _gathers_counted(engine) as counts:
                step(engine, number)
        assert counts["late"] == counts["all"] > 0
        engine.destroy()


def test_a_peer_that_holds_a_bucket_back_is_not_waited_for() -> None:
    """Its reduction never ends while the backward runs, so the host gives up waiting and the streams never begin."""
    with simulated_device(ranks=2):
        engine = engine_at(3, model=tower(depth=6), zero={"stage3_prefetch_bucket_size": 1, **NOTHING_KEPT})
        step(engine)
        finish, early = gradients.GradientBucket.finish_reduction, []

        def recording_finish(self: Any) -> None:
            early.append(not engine._runtime.passes.expects_no_gather)
            finish(self)

        with (
            mock.patch.object(native, "pause"),
            mock.patch.object(gradients, "_PATIENCE", 0.0),
            mock.patch.object(gradients, "log_dist") as warned,
            mock.patch.object(gradients.GradientBucket, "finish_reduction", recording_finish),
        ):
            for number in (1, 2):
                engine.backward(engine(batch(engine, number)))
                assert warned.call_count == number  # once in each backward
                engine.step()
        assert early and not any(early)
        engine.destroy()


def _lines_of_a_step(depth: int) -> int:
    """How many lines the code executes in one step that is run for every gather, gradient and reduction."""
    files = {sys.modules[name].__file__ for name in sys.modules if name.startswith("deepspeed.zero.")}
    files &= {module.__file__ for module in (schedule, gradients)} | {
        sys.modules[f"deepspeed.zero.gather.{name}"].__file__ for name in ("hooks", "handles")
    }
    count = 0

    def local(frame: Any, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    def trace(frame: Any, _event: str, _argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        count += 1  # a call, or one turn of a generator
        return local

    with SimulatedJob(0, Mesh(((DATA, 8),)), "nccl").as_current():
        zero = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1, **NOTHING_KEPT}
        engine = engine_of(tower(depth), 3, zero=zero)
        assert len(engine._runtime.buckets) == depth + 2
        for measured in (False, True):
            before = sys.gettrace()
            sys.settrace(trace if measured else before)
            try:
                engine.backward(engine(torch.ones(2, WIDTH)))
            finally:
                sys.settrace(before)
            engine.step()
        engine.destroy()
    return count


def test_the_work_of_a_gather_does_not_grow_with_the_number_of_buckets() -> None:
    few, many = _lines_of_a_step(98), _lines_of_a_step(998)
    assert 0 < many < 10.2 * few


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_plan_counts_the_gradients_in_flight(accumulation: int) -> None:
    cell = Cell(3, accumulation=accumulation, zero=(("stage3_prefetch_bucket_size", 1),))
    found = deepspeed.plan(
        SHAPE,
        cell.config(""),
        devices_per_node=2,
        sequence_length=TOKENS,
        compare_checkpointing=False,
        suggest=False,
    )
    planned = found.simulated.kind_peaks[StorageKind.GRADIENT_BUCKET, Tier.DEVICE]
    with simulated_device(ranks=2):
        torch.manual_seed(0)
        engine = deepspeed.initialize(model=Decoder(SHAPE), config=cell.config(""))[0]
        tokens = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64).to(engine.device)
        for _ in range(2):
            engine._runtime.memory_tracker.reset_peak()
            for _ in range(accumulation):
                engine.backward(engine(tokens, tokens))
                engine.step()
        assert engine._runtime.memory_tracker.peak(StorageKind.GRADIENT_BUCKET) == planned
        engine.destroy()
