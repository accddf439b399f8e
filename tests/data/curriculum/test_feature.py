"""The older ``curriculum_learning`` section: which length each training forward is handed."""

import pytest
import torch
from torch import nn

from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from tests.engine.support import engine_of
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import tower

SECTION = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 2,
    "max_difficulty": 10,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 2},
}


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 5)
        self.lengths: list[int | None] = []

    def forward(self, tokens: torch.Tensor, curriculum_seqlen: int | None = None) -> torch.Tensor:
        self.lengths.append(curriculum_seqlen)
        tokens = tokens if curriculum_seqlen is None else tokens[:, :curriculum_seqlen]
        return self.embedding(tokens).square().mean()


def _lengths(folder, stage):
    tokens = torch.arange(12).view(1, 12)
    engine = engine_of(Reader(), stage, accumulation=2, curriculum_learning=SECTION)
    assert engine.curriculum_enabled_legacy() and engine.curriculum_params_legacy()["max_difficulty"] == 10

    def step(engine):
        for _ in range(2):
            engine.backward(engine(tokens))
            engine.step()

    for _ in range(4):
        step(engine)
        shown = engine.curriculum_scheduler_legacy.get_current_difficulty()
    engine.eval()
    with torch.no_grad():
        engine(tokens)
    engine.train()
    engine.save_checkpoint(folder)
    step(engine)
    first, then = engine.module.lengths, shown
    engine.destroy()
    again = engine_of(Reader(), stage, accumulation=2, curriculum_learning=SECTION)
    again.load_checkpoint(folder)
    step(again)
    return first, then, again.module.lengths


@pytest.mark.parametrize("stage", [0, 3])
def test_each_training_forward_gets_its_length(stage, tmp_path):
    lengths, shown, resumed = run_ranks(_lengths, 2, tmp_path, stage)[0]
    assert lengths == [2, 2, 4, 4, 4, 4, 6, 6, None, 6, 6]
    assert shown == 6 and resumed == [6, 6]


@on_ranks(1)
def test_a_schedule_of_ones_own():
    section = {**SECTION, "schedule_type": "custom", "schedule_config": {}}
    engine = engine_of(Reader(), 1, curriculum_learning=section)
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 3 * step})
    for _ in range(2):
        engine.backward(engine(torch.zeros(1, 12, dtype=torch.long)))
        engine.step()
    with pytest.raises(CallOrderError, match="no loader with a curriculum"):
        engine.set_custom_curriculum_learning_schedule({"voc": lambda step: step})
    found = engine.module.lengths
    assert found == [3, 6]


@on_ranks(1)
def test_a_model_that_takes_no_length_is_named():
    with pytest.raises(
        DeepSpeedConfigError, match="Tower.forward to take the keyword curriculum_seqlen, which it does not"
    ):
        engine_of(tower(), 0, curriculum_learning=SECTION)
    with pytest.raises(DeepSpeedConfigError, match="curriculum_learning.schedule_config.difficulty_step: is required"):
        engine_of(Reader(), 0, curriculum_learning={**SECTION, "schedule_config": {"total_curriculum_step": 8}})
    engine = engine_of(tower(), 0, curriculum_learning={**SECTION, "curriculum_type": None})
    assert engine.curriculum_scheduler_legacy.get_current_difficulty() == 2
    assert engine_of(tower(), 0).curriculum_params_legacy() is None
