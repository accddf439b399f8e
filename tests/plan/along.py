"""Real training steps along any axis, counted, and plans compared with them."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.comm.base.counters import counted
from deepspeed.ops.flat import drop_scratch
from deepspeed.plan.memory import MemoryCount
from deepspeed.plan.simulation import loss_of
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind
from tests.plan.cells import SAMPLES


def count_step(
    model: nn.Module, config: dict[str, Any], tokens: int, *, positions: int | None = None
) -> dict[str, Any]:
    """Trains on this rank and counts the third step.

    Args:
        model: Takes ``input_ids`` and ``labels``.
        config: The configuration, with accumulation steps in it.
        tokens: Of this rank.
        positions: Position of the first of them, for a model that wants ``position_ids``.
    """
    drop_scratch(torch.device("cpu"))
    count = MemoryCount("cpu")
    accumulation = config["gradient_accumulation_steps"]
    with count.counting():
        engine = deepspeed.initialize(model=model, config=config)[0]
        batch = torch.zeros(SAMPLES, tokens, dtype=torch.int64)
        inputs = {"input_ids": batch, "labels": batch}
        if positions is not None:
            inputs["position_ids"] = torch.arange(positions, positions + tokens).expand(SAMPLES, -1).contiguous()
            inputs["shift_labels"] = batch  # ranks that share a sequence must be told
        for _ in range(2):
            _step(engine, inputs, accumulation, count)
        engine.optimizer.count_state()
        memory_tracker = engine._runtime.memory_tracker
        memory_tracker.reset_peak()
        count.reset_peaks()
        with counted() as traffic:
            activations = _step(engine, inputs, accumulation, count)
            requested = {key: (tally.calls, tally.nbytes) for key, tally in traffic.requested_along.items()}
            ran = {key: (tally.calls, tally.nbytes) for key, tally in traffic.ran_along.items()}
        count.update_peaks()
        kinds = {(kind.name, tier.name): memory_tracker.peak(kind, tier) for kind in StorageKind for tier in Tier}
        engine.destroy()
    return {
        "kinds": {key: n for key, n in kinds.items() if n},
        "requested": requested,
        "ran": ran,
        "peak": count.peaks[Tier.DEVICE].nbytes,
        "at": str(count.peaks[Tier.DEVICE]),
        "activations": activations,
    }


def _step(engine: Any, inputs: dict[str, torch.Tensor], accumulation: int, count: MemoryCount) -> int:
    most = 0
    for _ in range(accumulation):
        held = count.other(Tier.DEVICE)
        loss = loss_of(engine(**inputs))
        most = max(most, count.other(Tier.DEVICE) - held)
        engine.backward(loss)
        engine.step()
        del loss
    return most


def assert_as_counted(plan: Any, real: dict[str, Any], what: Any, *, aside: int = 0) -> None:
    """Fails unless traffic is equal, model states are within 2 %, and activations and the highest sum within 5 %.

    Args:
        plan: The plan of one rank.
        real: What :func:`count_step` counted on it.
        what: The training, for the message.
        aside: Bytes that are there for values only, which a simulation has not.
    """
    found = plan.simulated
    assert found.flow.requested_along == real["requested"], (what, found.flow.requested_along, real["requested"])
    assert found.flow.ran_along == real["ran"], (what, found.flow.ran_along, real["ran"])
    kinds = {(kind.name, tier.name): nbytes for (kind, tier), nbytes in found.kind_peaks.items()}
    assert kinds.keys() == real["kinds"].keys(), what
    for key, nbytes in real["kinds"].items():
        assert kinds[key] == pytest.approx(nbytes, rel=0.02), (what, key)
    assert found.activations == pytest.approx(real["activations"], rel=0.05), (what, "activations")
    assert found.peaks[Tier.DEVICE].nbytes == pytest.approx(real["peak"] - aside, rel=0.05), (
        what,
        plan.simulated.peaks[Tier.DEVICE],
        real["at"],
    )
