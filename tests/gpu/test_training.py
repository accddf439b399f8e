"""Training on a device gives the losses of plain torch on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from tests.device.support import batch, engine_at
from tests.engine.support import inputs
from tests.gpu.places import on_both, run_at
from tests.harness.toy_models import tower

STEPS = 4
CELLS = [
    (0, "device", "fp32", 1),
    (1, "device", "bf16", 2),
    (2, "optimizer on the host", "fp32", 2),
    (2, "optimizer on the host", "fp16", 1),
    (3, "device", "fp32", 1),
    (3, "both on the host", "bf16", 2),
    (3, "both in files", "fp32", 1),
]


def _plain(accumulation: int) -> list[float]:
    """Losses of torch on the CPU in fp32."""
    model = copy.deepcopy(tower(depth=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        for micro in range(accumulation):
            loss = model(inputs(step, micro))
            (loss / accumulation).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _ours(stage: int, tier: str, folder: str, precision: str, accumulation: int) -> tuple[list[float], str]:
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = engine_at(stage, tier, Path(folder), precision=precision, accumulation=accumulation, gradient_clipping=0.5)
    losses = []
    for step in range(STEPS):
        for micro in range(accumulation):
            loss = engine(batch(engine, step, micro))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    name = get_accelerator().device_name()
    engine.destroy()
    return losses, name


@on_both
@pytest.mark.parametrize(("stage", "tier", "precision", "accumulation"), CELLS)
def test_losses_are_those_of_plain_torch(place, stage, tier, precision, accumulation, tmp_path):
    losses, device = run_at(place, _ours, stage, tier, str(tmp_path), precision, accumulation)
    assert device == "cuda"
    tolerance = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.02}[precision]
    assert losses == pytest.approx(_plain(accumulation), rel=tolerance)
