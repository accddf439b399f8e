"""What a step asks the network for and what runs for it, in calls and bytes, per stage.

Psi is the bytes of all buckets, padding included. Asked for, per step: stages 0 to 2 move 2 Psi (stage 0 an all-reduce,
stages 1 and 2 a reduce-scatter and a gather), stage 3 moves 3 Psi (two gathers and a reduce-scatter). On gloo every
collective runs as sends of slices: of each Psi asked for a rank sends its (N - 1) / N.
"""

import pytest

from deepspeed.comm.base.counters import counted
from tests.engine.support import engine_of, inputs, rank
from tests.harness import run_ranks
from tests.harness.toy_models import tower

SMALL = {"reduce_bucket_size": 200, "overlap_comm": True}
SHARDED = {
    **SMALL,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 400,
}
# Stage 3 moves a little less: the last unit's backward follows its forward, so it is not gathered again in between.
SMALL_EXCHANGE = 4096  # bytes that norms, flags and agreements may take per step


def _one_step(stage, zero, accumulation, **config):
    """Traffic of the third step, when orders are known: what was asked for, what ran, and the sizes."""
    engine = engine_of(tower(), stage, zero=zero, accumulation=accumulation, **config)
    layouts = [bucket.layout for bucket in engine._runtime.buckets]
    for step in range(2):
        for micro in range(accumulation):
            engine.backward(engine(_input(step, micro)))
            engine.step()
    with counted() as traffic:
        for micro in range(accumulation):
            engine.backward(engine(_input(2, micro)))
            engine.step()
        requested = {name: (tally.calls, tally.nbytes) for name, tally in traffic.requested.items()}
        ran = {name: (tally.calls, tally.nbytes) for name, tally in traffic.ran.items()}
    itemsize = engine._runtime.buckets[0].dtype.itemsize
    padded, used = (sum(getattr(layout, n) for layout in layouts) * itemsize for n in ("numel", "used_numel"))
    last = layouts[-1].numel * itemsize
    return {"requested": requested, "ran": ran, "psi": padded, "used": used, "buckets": len(layouts), "last": last}


def _input(*position):
    """With a gradient of its own, or the backward would not need the first unit's weights."""
    return inputs(*position, rank()).requires_grad_()


def _sent(result):
    return sum(nbytes for _, nbytes in result["ran"].values())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, {"all_reduce": 2}),
        (1, {"reduce_scatter": 1, "all_gather": 1}),
        (2, {"reduce_scatter": 1, "all_gather": 1}),
        (3, {"reduce_scatter": 1, "all_gather": 2}),
    ],
)
def test_multiples_of_the_parameters_per_step(stage, expected, ranks):
    result = run_ranks(_one_step, ranks, stage, SHARDED if stage == 3 else SMALL, 1)[0]
    psi, not_again = result["psi"], result["last"] if stage == 3 else 0
    assert {name: nbytes for name, (_, nbytes) in result["requested"].items()} == {
        name: times * psi - (not_again if name == "all_gather" else 0) for name, times in expected.items()
    }
    total = sum(expected.values()) * psi - not_again
    share = total * (ranks - 1) / ranks
    assert share <= _sent(result) <= share + SMALL_EXCHANGE, (share, result["ran"])
    # 64 elements per parameter and ranks * 64 per bucket at most
    assert psi - result["used"] <= 4 * (64 * 20 + 64 * ranks * result["buckets"])


def test_accumulation_multiplies_what_is_sent_per_micro_batch():
    """Stages 0 and 1 reduce once per step; 2 reduces, and 3 also gathers, per micro-batch."""
    found = {}
    for stage in range(4):
        result = run_ranks(_one_step, 2, stage, SHARDED if stage == 3 else SMALL, 3)[0]
        found[stage] = {name: nbytes / result["psi"] for name, (_, nbytes) in result["requested"].items()}
        if stage == 3:
            found[stage]["all_gather"] += 3 * result["last"] / result["psi"]
    assert found == {
        0: {"all_reduce": 2},
        1: {"reduce_scatter": 1, "all_gather": 1},
        2: {"reduce_scatter": 3, "all_gather": 1},
        3: {"reduce_scatter": 3, "all_gather": 6},
    }


def test_what_is_kept_or_persistent_is_not_gathered_again():
    """Kept between forward and backward: one gather. Persistent: gathered only after the update, as at stage 2."""
    kept = {**SHARDED, "stage3_max_reuse_distance": 10**9}
    result = run_ranks(_one_step, 2, 3, kept, 1)[0]
    assert result["requested"]["all_gather"] == (result["buckets"], result["psi"])
    result = run_ranks(_one_step, 2, 3, {**SMALL, "stage3_param_persistence_threshold": 10**6}, 1)[0]
    assert result["requested"]["all_gather"] == (result["buckets"], result["psi"])


def test_one_rank_sends_nothing():
    for stage in range(4):
        result = run_ranks(_one_step, 1, stage, SHARDED if stage == 3 else SMALL, 2)[0]
        assert _sent(result) == 0 and not result["requested"], (stage, result)


def test_16_bit_halves_the_traffic():
    full, half = (
        run_ranks(_one_step, 2, 2, SMALL, 1, **config)[0]["requested"] for config in ({}, {"bf16": {"enabled": True}})
    )
    assert {name: nbytes for name, (_, nbytes) in full.items()} == {
        name: 2 * nbytes for name, (_, nbytes) in half.items()
    }


def _largest_message(stage, limit):
    engine = engine_of(tower(), stage, zero={**SHARDED, "reduce_bucket_size": limit})
    sizes = []
    transport = engine._runtime.groups["data"].reduce
    send = transport.send

    def noting(tensor, *args):
        sizes.append(tensor.numel())
        return send(tensor, *args)

    transport.send = noting
    for step in range(3):
        engine.backward(engine(inputs(step, rank())))
        if step:
            found = max(sizes)
        engine.step()
        sizes.clear()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_reduction_limit_is_kept(stage):
    """No message of a reduction is larger than the limit, also where one parameter is (64 elements are the least)."""
    for limit in (64, 128, 200):
        for largest in run_ranks(_largest_message, 2, stage, limit):
            assert largest <= limit
