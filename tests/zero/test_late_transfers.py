"""Results do not depend on when a transfer completes, as long as it has when somebody waits for it."""

import pytest
import torch

from tests.engine.support import engine_of, inputs, rank
from tests.harness import assert_states_equal, run_ranks
from tests.harness.late import late_network
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters

LIMITS = [
    {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
    {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 700, "stage3_max_reuse_distance": 0},
    {"stage3_param_persistence_threshold": 0},
]


def _train(stage, zero, accumulation):
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
    for number, zero in enumerate(LIMITS if stage == 3 else LIMITS[:1]):
        accumulation = 1 + number % 2
        expected = _train(stage, zero, accumulation)
        for seed in range(first, first + count):
            with late_network(seed) as network:
                found = _train(stage, zero, accumulation)
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
