"""Training in interpreters without anything that the tests preload: gloo's event loops and malloc as users have them.

Elsewhere in the tests a library lets the event loops wait for locks (``tests/harness/event_loops.py``), which changes
the order in which messages arrive, and its ``LD_PRELOAD`` leaves malloc's settings alone.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed.accelerator.cpu import keep_freed_memory
from tests.engine.support import adamw, engine_of, inputs
from tests.harness import on_ranks
from tests.harness.event_loops import LIBRARY
from tests.harness.toy_models import tower

STEPS = 6


def _losses(stage: int) -> list[float]:
    """Returns the mean loss of each step."""
    engine, found = engine_of(tower(), stage), []
    for step in range(STEPS):
        loss = engine(inputs(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(total.item() / dist.get_world_size())
    engine.destroy()
    return found


def _plain(ranks: int) -> list[float]:
    model = tower()
    optimizer, found = adamw(model), []
    for step in range(STEPS):
        loss = torch.stack([model(inputs(step, rank)) for rank in range(ranks)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@on_ranks(3, fresh="interpreter")
def test_training_without_the_preloaded_library_is_as_in_plain_torch() -> None:
    expected = _plain(3)
    assert "LD_PRELOAD" not in os.environ
    if sys.platform == "linux":
        assert LIBRARY not in Path("/proc/self/maps").read_text() and keep_freed_memory()
    by_stage = {stage: _losses(stage) for stage in range(4)}
    for stage, losses in by_stage.items():
        assert losses == pytest.approx(expected, rel=1e-4), stage
