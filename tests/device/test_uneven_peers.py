"""Ranks that use different parameters from some step on, over transfers that must come in one order."""

from unittest import mock

import torch

from deepspeed.zero.gradient import gradients
from tests.device.support import engine_at
from tests.engine.support import inputs, rank
from tests.harness import run_ranks
from tests.harness.device import simulated_rank
from tests.zero.gather.test_agreement import ChooserTower

STEPS: tuple[tuple[int, int], ...] = ((2, 2), (2, 2), (2, 0), (2, 2), (1, 2))
"""For each step what each of two ranks uses of a layer: its first linear, its second one, or both."""


def _train(on_device: bool) -> list[float]:
    def run() -> list[float]:
        torch.manual_seed(3)
        zero = {"stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 0}
        engine = engine_at(3, model=ChooserTower(), precision="fp32", zero=zero)
        losses = []
        for number, used in enumerate(STEPS):
            loss = engine(inputs(number, rank()).to(engine.device), [used[rank()]] * 8)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses

    if not on_device:
        return run()
    with simulated_rank(), mock.patch.object(gradients, "_PATIENCE", 0.2):
        return run()


def test_the_first_step_in_which_ranks_differ_does_not_hang() -> None:
    """No stream waits for a reduction that a peer holds back; the host gives up waiting for it."""
    on_device = run_ranks(_train, 2, True, backend=None)
    assert torch.allclose(torch.tensor(on_device), torch.tensor(run_ranks(_train, 2, False)), rtol=1e-5)
