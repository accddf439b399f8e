"""``activation_checkpointing.blocks``: less is kept, and the training is the same."""

from __future__ import annotations

import pytest
import torch

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from tests.harness.pool import run_ranks
from tests.harness.toy_models import TOWER_WIDTH, Tower


def train(stage: int, blocks: bool) -> tuple[list[float], int]:
    """Returns the losses, and how often the first block ran."""
    torch.manual_seed(0)
    model = Tower()
    calls = 0
    inner = model.layers[0].rise

    def count(*_):
        nonlocal calls
        calls += 1

    inner.register_forward_pre_hook(count)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.5,
        "activation_checkpointing": {"blocks": blocks},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    torch.manual_seed(engine.global_rank)
    losses = []
    for _ in range(6):
        loss = engine(torch.randn(2, TOWER_WIDTH))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, calls


@pytest.mark.parametrize("stage", [0, 3])
def test_blocks_run_twice_and_the_losses_are_the_same(stage):
    for (plain, once), (checkpointed, twice) in zip(
        run_ranks(train, 2, stage, False), run_ranks(train, 2, stage, True), strict=True
    ):
        assert checkpointed == plain
        assert (once, twice) == (6, 12)


def refused() -> str:
    config = {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {"blocks": True}}
    with pytest.raises(DeepSpeedConfigError) as caught:
        deepspeed.initialize(model=torch.nn.Linear(2, 2), model_parameters=[], config=config)
    return str(caught.value)


def test_a_model_without_blocks_is_refused():
    assert (
        "expected a model with repeated blocks (children of a ModuleList), found none in Linear"
        in run_ranks(refused, 1)[0]
    )
