"""The Trainer resumes in order: the samples of each step are those of a run that was never interrupted."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ecosystem.support import needs_transformers
from tests.harness import run_ranks

STEPS = 13


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 22  # not a multiple of the batch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)]), "labels": torch.zeros(1)}


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.config = nn.Linear(1, 1), None
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(x.flatten().int().tolist())
        logits = self.inner(x)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def _train(stop: int, folder: str, micro: int, resume: str | None) -> list[list[int]]:
    """Samples of each step, over all ranks, until a checkpoint is saved at step ``stop``."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = control.should_training_stop = state.global_step == stop

    config = {
        "train_micro_batch_size_per_gpu": micro,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=micro, max_steps=STEPS, save_strategy="no", deepspeed=config,
        report_to=[], disable_tqdm=True, use_cpu=True, seed=7,
    )  # fmt: skip
    model = Recorder()
    Trainer(model=model, args=arguments, train_dataset=Numbers(), callbacks=[Stop()]).train(
        resume_from_checkpoint=resume
    )
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, model.seen)
    return [sorted(sum(rows, [])) for rows in zip(*every, strict=True)]


@needs_transformers
@pytest.mark.slow
def test_two_resumes_and_another_number_of_ranks_between(tmp_path):
    whole = run_ranks(_train, 2, STEPS, str(tmp_path / "whole"), 2, None, fresh=True)[0]
    assert len(whole) == STEPS and set(sum(whole[:6], [])) == set(range(22))
    for name, plan in {"same": [(2, 3), (2, 8), (2, STEPS)], "other": [(2, 3), (1, 5), (2, STEPS)]}.items():
        found: list[list[int]] = []
        resume = None
        for ranks, stop in plan:
            folder = str(tmp_path / name)
            found += run_ranks(_train, ranks, stop, folder, 4 // ranks, resume, fresh=True)[0]
            resume = os.path.join(folder, f"checkpoint-{stop}")
        assert found == whole, name
