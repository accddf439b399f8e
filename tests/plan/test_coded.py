"""A plan of a run whose values travel as codes: what ranks keep of what is lost, and the bytes of the codes."""

from __future__ import annotations

import pytest

import deepspeed
from deepspeed.plan.result import Plan
from deepspeed.zero.placement import Home
from deepspeed.zero.storage import Kind
from tests.plan.cells import SHAPE
from tests.zero.rounding import Rounding, travelling_rounded

PSI = 870400  # elements of the buckets of SHAPE over 8 ranks; see tests/plan/test_pure_data.py
RANKS, MICRO_BATCHES = 8, 4


def planned(stage: int) -> Plan:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.plan(
        SHAPE, config, nodes=2, devices_per_node=4, sequence_length=64, suggest=False, compare_checkpointing=False
    )


@pytest.mark.parametrize(("stage", "kept", "reductions"), [(0, PSI + PSI // RANKS, 1), (2, PSI, MICRO_BATCHES)])
def test_errors_and_codes_are_in_the_plan(stage: int, kept: int, reductions: int) -> None:
    plain = planned(stage)
    with travelling_rounded(None, Rounding()):
        coded = planned(stage)
    assert coded.rehearsed.kind_peaks[Kind.PRIVATE, Home.DEVICE] == 8 * kept  # a skipped step leaves it as it was
    assert coded.device_bytes >= plain.device_bytes + 8 * kept
    moved = {travel.title: travel.nbytes for travel in coded.travels}
    assert moved["swap"] == reductions * 2 * PSI * (RANKS - 1) // RANKS
    assert "error feedback" in str(coded)
