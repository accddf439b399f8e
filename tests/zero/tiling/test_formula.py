"""Model-state bytes per rank, counted, against arithmetic done here from the sizes of the buckets."""

import pytest
import torch.distributed as dist

from deepspeed.zero.storage import StorageKind
from deepspeed.zero.tiling.formula import MemoryFormula
from tests.engine.support import SHARDED, engine_of, inputs, rank
from tests.harness import run_ranks
from tests.harness.toy_models import tower

MODES = {"fp32": ({}, 4), "bf16": ({"bf16": {"enabled": True}}, 2)}


def _phases(stage, zero, mode):
    """Asserts the bytes after init, forward, backward and step, for one micro-batch per step."""
    config, itemsize = MODES[mode]
    engine = engine_of(tower(), stage, zero=zero, **config)
    memory_tracker, ranks = engine._runtime.memory_tracker, dist.get_world_size()
    buckets = engine._runtime.buckets
    psi = sum(bucket.layout.numel for bucket in buckets)
    sharded = sum(bucket.layout.numel for bucket in buckets if bucket.is_sharded)
    if stage == 3 and ranks > 1 and zero == SHARDED:
        assert sharded == psi and len(buckets) >= 4
    compute = itemsize * (psi - sharded + sharded // ranks)
    owned = psi // ranks if stage >= 1 else psi
    master = 4 * owned if itemsize < 4 else 0
    reduced = 4 * owned if ranks > 1 else 0

    def check(phase, gradient, gathered, optimizer):
        expected = {
            StorageKind.COMPUTE: compute,
            StorageKind.MASTER: master,
            StorageKind.GRADIENT: gradient,
            StorageKind.GATHERED: gathered,
            StorageKind.OPTIMIZER: optimizer,
        }
        engine.optimizer.count_state()
        found = {kind: memory_tracker.live(kind) for kind in expected}
        # One rank: the packed gradient itself is what the update reads; its memory is kept for the next backward.
        packed = itemsize * psi if ranks == 1 and (step or phase in ("backward", "step")) else 0
        assert memory_tracker.live(StorageKind.GRADIENT_BUCKET) == packed, f"after {phase}: gradient buckets"
        assert found == expected, f"after {phase}: {found}, expected {expected}"

    step = 0
    check("init", 0, 0, 0)
    for step in range(3):
        moments = 8 * owned if step else 0
        loss = engine(inputs(step, rank()))
        kept = sum(b.full.nbytes for b in buckets if b.is_sharded and b.is_kept)
        if zero == SHARDED:
            assert kept <= buckets[-1].full.nbytes, "only the last unit may stay, whose backward is next"
        check("forward", 0, kept, moments)
        engine.backward(loss)
        check("backward", reduced, 0, moments)
        engine.step()
        check("step", 0, 0, 8 * owned)
        for kind, counted, formula, _ in engine.memory_report():
            assert counted == formula, f"the report's {kind}: {counted} counted, {formula} by formula"
        shapes = {tuple(p.shape) for b in buckets if b.is_sharded for p in b.params}
        assert shapes <= {(0,)}, "sharded parameters are empty between steps"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_phase(ranks, mode):
    for stage in range(4):
        run_ranks(_phases, ranks, stage, {}, mode)
    run_ranks(_phases, ranks, 3, SHARDED, mode)


def _accumulating(stage, mode, sum_dtype):
    """Asserts the bytes of gradients after each of three micro-batches and after the step."""
    config, itemsize = MODES[mode]
    config = {**config, "data_types": {"grad_accum_dtype": sum_dtype}}
    engine = engine_of(tower(), stage, accumulation=3, **config)
    memory_tracker, ranks = engine._runtime.memory_tracker, dist.get_world_size()
    psi = sum(bucket.layout.numel for bucket in engine._runtime.buckets)
    owned = psi // ranks if stage >= 1 else psi
    bytes_of_sum = 4 if sum_dtype == "fp32" else 2
    formula = MemoryFormula(engine._runtime.layout, engine._runtime.placement, host_is_device=True)
    for step in range(2):
        for micro in range(3):
            engine.backward(engine(inputs(step, micro, rank())))
            last = micro == 2
            if ranks == 1 or (stage < 2 and not last):
                expected = bytes_of_sum * psi  # the sum over micro-batches, of whole gradients
            else:
                expected = (bytes_of_sum if stage >= 2 else 4) * owned  # ranks are summed in fp32
            where = f"stage {stage}, {mode}, sum {sum_dtype}, {ranks} rank(s), step {step}, micro-batch {micro}"
            assert memory_tracker.live(StorageKind.GRADIENT) == expected, where
            by_formula, _ = formula.gradients(accumulation=True, reduced=last, accumulate_itemsize=bytes_of_sum)
            assert by_formula == expected, f"{where}: {by_formula} by formula"
            engine.step()
        for kind, counted, number, _ in engine.memory_report():
            assert counted == number, f"the report's {kind}: {counted} counted, {number} by formula"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_with_accumulation(ranks):
    for stage in range(4):
        for mode, sum_dtype in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")):
            run_ranks(_accumulating, ranks, stage, mode, sum_dtype)


def _peak(max_live):
    zero = {**SHARDED, "stage3_prefetch_bucket_size": 10**6, "stage3_max_live_parameters": max_live}
    engine = engine_of(tower(depth=6), 3, zero=zero)
    for step in range(3):
        engine._runtime.memory_tracker.reset_peak()
        engine.backward(engine(inputs(step, rank())))
        peak = engine._runtime.memory_tracker.peak(StorageKind.GATHERED)
        engine.step()
    return peak, 4 * max(bucket.layout.numel for bucket in engine._runtime.buckets)


def test_live_parameters_are_limited():
    """At most the limit, or the two units that the end of one and the start of the next need."""
    for max_live in (0, 1200):
        for peak, largest in run_ranks(_peak, 2, max_live):
            assert peak <= max(4 * max_live, 2 * largest), (max_live, peak, largest)
