"""A plan of a run with an optimizer that exchanges momenta: what ranks keep for it."""

import pytest

import deepspeed
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind
from tests.plan.cells import SHAPE


@pytest.mark.parametrize("stage", [0, 1])
def test_errors_and_momentum_are_in_the_plan(stage: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,  # by a norm that is estimated with random signs
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 10}},
        "zero_optimization": {"stage": stage},
    }
    plan = deepspeed.plan(
        SHAPE, config, nodes=1, devices_per_node=4, sequence_length=64, suggest=False, compare_checkpointing=False
    )
    kept = plan.simulated.kind_peaks[StorageKind.PRIVATE, Tier.DEVICE]
    # Psi + Psi / N, and Psi each for the whole momentum and what it is divided by.
    errors = kept / (4 * 1.25) if stage == 0 else kept / (4 * 3.25)
    assert 0.9 * errors < plan.simulated.kind_peaks[StorageKind.COMPUTE, Tier.DEVICE] / 2 < 1.1 * errors
