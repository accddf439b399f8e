"""Stages differ in what is sent and kept, never in the mathematics."""

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.base.counters import counted
from deepspeed.engine import initialize
from tests.engine.matrix.cells import LIMITS
from tests.engine.support import engine_of, inputs, rank, same_on_all_ranks
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.late import late_network
from tests.harness.toy_models import awkward, losses_of, make_batch, param_groups, tower
from tests.oracle.optimizers import REFERENCES
from tests.zero.reading import full_masters

# The stage never changes the mathematics: bit for bit where the order of sums is the same.


PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
}
STEPS = 4


def _train(stage, precision, limits, accumulation, optimizer="AdamW"):
    """Norms and weights of every step of the awkward model, with clipping and an overflow in step 1."""
    model = awkward()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage, **LIMITS[limits]},
        **PRECISIONS[precision],
    }
    client = REFERENCES[optimizer](param_groups(model)) if optimizer != "Lamb" else None
    if client is None:
        config["optimizer"] = {"type": "Lamb", "params": {"lr": 0.01}}
    engine, *_ = initialize(
        model=model, optimizer=client, model_parameters=None if client else param_groups(model), config=config
    )
    trace = []
    for step in range(STEPS):
        for micro in range(accumulation):
            boost = float("inf") if step == 1 and dist.get_rank() == 0 and micro == 0 else 1.0
            batch = make_batch(step, micro, dist.get_rank(), branch=step != 2, boost=boost)
            engine.backward(losses_of(engine(batch)).loss)
            engine.step()
        norm = "not finite" if engine.optimizer.overflow else engine.get_global_grad_norm()
        trace.append({"norm": norm, "weights": full_masters(engine)})
    assert engine.skipped_steps == 1
    assert same_on_all_ranks([entry["norm"] for entry in trace])
    return trace


def _compare(pairs, precisions, limits, accumulation, optimizer="AdamW"):
    for precision in precisions:
        for group in pairs:
            traces = {
                (stage, name): _train(stage, precision, name, accumulation, optimizer)
                for stage in group
                for name in limits
            }
            first = next(iter(traces.values()))
            for (stage, name), trace in traces.items():
                try:
                    assert_states_equal(trace, first)
                except AssertionError as error:
                    raise AssertionError(f"stage {stage}, {name} limits, {precision}: {error}") from None


@pytest.mark.parametrize(
    ("ranks", "precisions"),
    [
        pytest.param(1, PRECISIONS, id="1"),
        pytest.param(2, PRECISIONS, id="2"),
        pytest.param(3, PRECISIONS, id="3", marks=pytest.mark.slow),
        pytest.param(4, ["fp16"], id="4-fp16"),
        pytest.param(4, ["fp32", "bf16"], id="4-others", marks=pytest.mark.slow),
    ],
)
def test_all_stages_agree_bit_for_bit_without_accumulation(ranks, precisions):
    """Also however the model is cut into buckets; in fp32, bf16 and fp16, over clipped and skipped steps."""
    run_ranks(_compare, ranks, [(0, 1, 2, 3)], precisions, ["default", "small"], 1)


@pytest.mark.parametrize(
    ("ranks", "precisions"),
    [
        pytest.param(2, ["bf16", "fp16"], id="2-others"),
        pytest.param(2, ["fp32"], id="2-fp32", marks=pytest.mark.slow),
        pytest.param(3, ["fp32"], id="3-fp32"),
        pytest.param(3, ["bf16", "fp16"], id="3-others", marks=pytest.mark.slow),
    ],
)
def test_pairs_of_stages_agree_bit_for_bit_with_accumulation(ranks, precisions):
    run_ranks(_compare, ranks, [(0, 1), (2, 3)], precisions, ["default", "small"], 3)


def test_one_rank_agrees_at_every_stage_with_accumulation():
    run_ranks(_compare, 1, [(0, 1, 2, 3)], PRECISIONS, ["default"], 3)


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RMSprop", "Lamb"])
def test_with_other_optimizers(optimizer):
    """Elementwise ones in small buckets only: tests/engine/matrix has each of them at both limits."""
    limits = ["default", "small"] if optimizer == "Lamb" else ["small"]
    run_ranks(_compare, 2, [(0, 1, 2, 3)], ["bf16"], limits, 1, optimizer)


@on_ranks(2)
def test_the_two_pairs_agree_to_fp32_rounding():
    """The two pairs differ by the order of sums only: fp32 rounding."""
    precision = "fp32"
    tolerance = 2e-5
    a, b = (_train(stage, precision, "small", 3) for stage in (1, 2))
    for left, right in zip(a, b, strict=True):
        assert_states_equal(left, right, rtol=tolerance, atol=tolerance / 10)


# What a step asks the network for and what runs for it, in calls and bytes, per stage.
#
# Psi is the bytes of all buckets, padding included. Asked for, per step: stages 0 to 2 move 2 Psi (stage 0 an
# all-reduce, stages 1 and 2 a reduce-scatter and a gather), stage 3 moves 3 Psi (two gathers and a reduce-scatter). On
# gloo every collective runs as sends of slices: of each Psi asked for a rank sends its (N - 1) / N.


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


# Results do not depend on when a transfer completes, as long as it has when somebody waits for it.


LIMITS_LATE_TRANSFERS = [
    {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
    {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 700, "stage3_max_reuse_distance": 0},
    {"stage3_param_persistence_threshold": 0},
]


def _train_late_transfers(stage, zero, accumulation):
    zero = {**zero, "reduce_bucket_size": 200, "overlap_comm": True}
    engine = engine_of(tower(depth=3), stage, zero=zero, accumulation=accumulation)
    losses = []
    for step in range(3):
        for micro in range(accumulation):
            loss = engine(inputs(step, micro, rank()))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    assert all(torch.isfinite(torch.tensor(losses)))
    return {"weights": full_masters(engine), "losses": losses}


def _seeds(stage, first, count):
    early = crossed = 0
    for number, zero in enumerate(LIMITS_LATE_TRANSFERS if stage == 3 else LIMITS_LATE_TRANSFERS[:1]):
        accumulation = 1 + number % 2
        expected = _train_late_transfers(stage, zero, accumulation)
        for seed in range(first, first + count):
            with late_network(seed) as network:
                found = _train_late_transfers(stage, zero, accumulation)
            assert_states_equal(found, expected)
            early += network.completed_early
            crossed += network.completed_out_of_order
    return early, crossed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_few_seeds(stage):
    for early, crossed in run_ranks(_seeds, 2, stage, 0, 4):
        assert early > 10, "the network was late, and sometimes less"
        assert crossed > 0 or stage == 0, "transfers overtook each other"


def test_three_ranks():
    run_ranks(_seeds, 3, 3, 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("stage", [1, 3])
def test_a_thousand_seeds(stage, block):
    run_ranks(_seeds, 2, stage, 100 * block, 100, timeout=290)
