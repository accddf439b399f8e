"""Parameters without a gradient stay as they are, whatever else of their bucket is updated, in every tier."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.harness import assert_states_equal, run_ranks
from tests.offload.test_cells import CELLS, offload
from tests.offload.test_copies import Elsewhere
from tests.offload.training import config

# Which parameters step after step uses. What is frozen from step 3 on stays so; experts differ from rank to rank.
STEPS = ("weight", "weight gain", "weight expert", "gain expert", "gain")
FROZEN_FROM = 3


class Mixed(nn.Module):
    """One bucket, in which whole chunks of an update get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((70, 70), 0.01))
        self.gain = nn.Parameter(torch.full((9000,), 2.0))
        for number in range(3):
            self.register_parameter(f"expert{number}", nn.Parameter(torch.full((30,), 3.0 + number)))

    def forward(self, x: torch.Tensor, used: str, rank: int) -> torch.Tensor:
        total = x.sum() * 0
        if "weight" in used and self.weight.requires_grad:
            total = total + (x.to(self.weight.dtype) @ self.weight).float().square().mean()
        if "gain" in used:
            total = total + (self.gain.float().square() * x.mean()).mean()
        if "expert" in used:
            total = total + (getattr(self, f"expert{rank}").float() * x.mean()).sum()
        return total


def train_uneven(settings: dict[str, Any], elsewhere: bool = False) -> list[list[torch.Tensor]]:
    """Body of a rank: the compute and master values after every step."""
    if elsewhere:
        with Elsewhere():
            return train_uneven(settings)
    torch.manual_seed(1)
    model = Mixed()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    runtime, seen = engine._runtime, []
    idle = count_idle_chunks(engine)
    assert len(runtime.buckets) == 1
    for step, used in enumerate(STEPS):
        if step == FROZEN_FROM:
            model.weight.requires_grad_(False)
        loss = engine(torch.randn(4, 70) + dist.get_rank(), used, dist.get_rank())
        engine.backward(loss)
        engine.step()
        seen.append([loss.detach()])
        seen[-1] += [bucket.shard.detach().clone() for bucket in runtime.buckets]
        seen[-1] += [master.flat.detach().clone() for master in runtime.masters]
    engine.destroy()
    assert not idle
    return seen


def count_idle_chunks(engine: Any) -> list[Any]:
    """Collects the chunks that travel although nothing in them is updated."""
    updater, idle = engine.inspect().updater._chunks, []
    update = updater._update

    def counted(chunk: Any, *others: Any) -> list[slice]:
        updated = update(chunk, *others)
        idle.extend([] if updated else [chunk])
        return updated

    updater._update = counted
    return idle


def train_each(every: list[tuple[dict[str, Any], bool]]) -> list[list[list[torch.Tensor]]]:
    return [train_uneven(*each) for each in every]


def settings_of(stage: int, precision: str, optimizer: str, **zero: Any) -> dict[str, Any]:
    made = config(stage, precision=precision, sub_group_size=4096, **zero)
    made["optimizer"] = {"type": optimizer, "params": {"lr": 0.05, "weight_decay": 0.1}}
    return made


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_home(ranks: int, tmp_path: Path) -> None:
    """Each cell of tiers, and those of an accelerator with results that go up, against training without offload."""
    kinds = [("bf16", "AdamW"), ("fp32", "SGD"), ("bf16", "SGD")]
    plain = {(stage, kind): (settings_of(stage, *kind), False) for stage in (2, 3) for kind in kinds}
    cells: dict[tuple[Any, ...], tuple[dict[str, Any], bool]] = {}
    for number, (stage, optimizer, param) in enumerate(CELLS):
        if stage < 4 - ranks:
            continue
        kind = kinds[(number + ranks) % len(kinds)]
        sections = offload(optimizer, param, tmp_path, pipelined=number % 2 == 0)
        cells[(stage, kind, optimizer, param, "here")] = (settings_of(stage, *kind, **sections), False)
        if optimizer != "none":
            kind = ("bf16", kind[1])
            cells[(stage, kind, optimizer, param, "elsewhere")] = (settings_of(stage, *kind, **sections), True)
    for got in run_ranks(train_each, ranks, [*plain.values(), *cells.values()], timeout=240):
        expected = dict(zip(plain, got, strict=False))
        for cell, trained in zip(cells, got[len(plain) :], strict=True):
            assert_states_equal({cell: trained}, {cell: expected[cell[:2]]})
