"""The stage never changes the mathematics: bit for bit where the order of sums is the same."""

import pytest
import torch.distributed as dist

from deepspeed.engine import initialize
from tests.engine.matrix.cells import LIMITS
from tests.engine.support import same_on_all_ranks
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import awkward, losses_of, make_batch, param_groups
from tests.oracle.optimizers import REFERENCES
from tests.zero.reading import full_masters

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
