"""Shorter sequences, dropped layers and dropped tokens, all at once, with everything else the engine does.

Each cell trains, saves in the middle, resumes bit for bit, and has the losses of stage 0 with its precision and
accumulation; stage 0 in fp32 is compared with plain torch.
"""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.data.curriculum import CurriculumScheduler
from deepspeed.dropping import ProgressiveLayerDrop, RandomLTDScheduler, convert_to_random_ltd
from deepspeed.dropping.layers import droppable_blocks
from deepspeed.dropping.tokens import RandomLayerTokenDrop, TokenDrop
from tests.engine.support import adamw, rank
from tests.harness import run_ranks
from tests.harness.cases import Cell, train_and_resume

STEPS, SAVED = 6, 3
LENGTH, WIDTH = 12, 8

CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 6,
    "max_difficulty": LENGTH,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 2},
}
LTD = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "random_ltd_schedule": {
        "min_value": 4,
        "max_value": LENGTH,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 6, "seq_per_step": 1},
    },
}
LAYERS = {"enabled": True, "theta": 0.3, "gamma": 1.0}
SECTIONS = {
    "curriculum_learning": CURRICULUM,
    "progressive_layer_drop": LAYERS,
    "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD}},
}


class Mixer(nn.Module):
    """Each token gets something of the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + self.fall(torch.tanh(self.rise(x + before)))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Mixer() for _ in range(4))
        self.last = nn.Linear(WIDTH, 16)

    def forward(self, tokens: torch.Tensor, curriculum_seqlen: int | None = None) -> torch.Tensor:
        tokens = tokens[:, :curriculum_seqlen]
        x = self.first(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.last(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def reader() -> Reader:
    model = Reader()
    deepspeed.progressive_layer_drop(model, "layers")
    return convert_to_random_ltd(model, Mixer)


CELLS = [
    Cell(1, "fp32", 2),
    Cell(3, "fp32", 1),
    Cell(3, "fp32", 2, offload=True),
    Cell(2, "bf16", 2),
    Cell(3, "bf16", 1, offload=True),
    Cell(2, "fp16", 1, offload=True),
    Cell(3, "fp16", 2),
]


def tokens(step: int, micro: int, of_rank: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(100 * step + 10 * micro + of_rank)
    return torch.randint(16, (2, LENGTH), generator=dice)


def run(cell: Cell, folder: Any) -> list[float]:
    seeded = []

    def start() -> Any:
        engine = cell.engine(reader(), **SECTIONS)
        if not seeded:
            torch.manual_seed(40 + rank())  # what drops tokens draws from it, of each rank its own
            seeded.append(True)
        return engine

    def look(engine: Any) -> None:
        assert engine.skipped_steps == 0 and engine.random_ltd_scheduler.get_current_seq() > 4

    def loss_of(model: Any, step: int, micro: int, of_rank: int) -> torch.Tensor:
        return model(tokens(step, micro, of_rank))

    return train_and_resume(start, loss_of, folder, steps=STEPS, saved=SAVED, look=look)


def plain() -> list[float]:
    """The first rank's losses by plain torch: both ranks' forwards in one process, each with its own generator."""
    model = reader()
    optimizer = adamw(model)
    lengths, theta = CurriculumScheduler(CURRICULUM), ProgressiveLayerDrop(LAYERS["theta"], LAYERS["gamma"])
    kept, drop = RandomLTDScheduler({**LTD, "global_batch_size": 4}), TokenDrop()
    for number in LTD["random_ltd_layer_id"]:
        layer = model.layers[number]
        assert isinstance(layer, RandomLayerTokenDrop)
        layer._token_drop = drop
    states = []
    for each in range(2):
        torch.manual_seed(40 + each)
        states.append(torch.get_rng_state())
    losses = []
    for step in range(STEPS):
        theta.update_state(max(step - 1, 0))
        drop.kept = kept.get_value(step)
        parts = []
        for each in range(2):
            droppable_blocks(model)[0][0].draw(theta.get_theta(), step, 0, 0)
            torch.set_rng_state(states[each])
            parts.append(model(tokens(step, 0, each), lengths.get_difficulty(step + 1)))
            states[each] = torch.get_rng_state()
        (sum(parts) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parts[0].item())
    return losses


def run_all(folder: Any) -> dict[Cell, list[float]]:
    references = {(cell.precision, cell.accumulation) for cell in CELLS}
    cells = [*(Cell(0, *each) for each in sorted(references)), *CELLS]
    return {cell: run(cell, folder / str(number)) for number, cell in enumerate(cells)}


def test_every_cell_has_the_losses_of_stage_0_and_resumes(tmp_path):
    found = run_ranks(run_all, 2, tmp_path, timeout=240)[0]
    expected = plain()
    assert found[Cell(0, "fp32", 1)] == pytest.approx(expected, rel=1e-5)
    for cell in CELLS:
        reference = found[Cell(0, cell.precision, cell.accumulation)]
        assert found[cell] == pytest.approx(reference, rel=1e-5 if cell.precision == "fp32" else 2e-2), str(cell)
