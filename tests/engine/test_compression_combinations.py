"""Codes with everything else: stages, accumulation, clipping, precisions, no_sync, overlap, and awkward models.

After one update a run whose gradients travel as codes is no further from one whose gradients travel as they are than
the codec loses of them; what codes must not touch is equal to the bit.
"""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.engine import DeepSpeedEngine
from tests.engine.support import engine_of, inputs, rank, same_on_all_ranks
from tests.harness import on_ranks

ROWS, USED_ROWS, WIDTH = 20, 11, 9
# Of the norm of what a rank sends: how much a codec may lose on the way there; on the way back as much again.
LOSES = {"sign": 1.0, "int8": 0.02, "int4": 0.25}


class Awkward(nn.Module):
    """Odd sizes, a tied weight, a frozen one, one that only rank 0 uses, and rows that nobody names."""

    def __init__(self, *, zeros: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(ROWS, WIDTH)
        self.rise, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.rise.weight
        self.frozen = nn.Linear(WIDTH, 13).requires_grad_(False)
        self.seldom = nn.Linear(13, 13)
        self.last = nn.Linear(13, 3)
        self.zeros = zeros

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.last.bias.dtype)
        names = (x.float().abs() * 7).long().sum(dim=1) % USED_ROWS
        x = self.frozen(torch.tanh(self.again(torch.tanh(self.rise(x + self.table(names))))))
        seldom = self.seldom(x.detach())
        if rank() == 0:
            x = x + seldom
        elif self.zeros:
            x = x + 0.0 * seldom
        return self.last(x).float().square().mean()


def make(stage: int, codec: str | None, model: nn.Module | None = None, **settings: Any) -> DeepSpeedEngine:
    section = {} if codec is None else {"gradients": codec, "block": 64, **settings.pop("section", {})}
    sharded = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0} if stage == 3 else {}
    zero = {**sharded, **settings.pop("zero", {})}
    return engine_of(
        model or Awkward(),
        stage,
        optimizer=lambda model: torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5),
        zero=zero,
        communication_compression=section,
        **settings,
    )


def update(engine: DeepSpeedEngine, step: int, *, holds_back: bool = False) -> None:
    steps = engine.gradient_accumulation_steps()
    for micro in range(steps):
        with engine.no_sync() if holds_back and micro < steps - 1 else nullcontext():
            engine.backward(engine(inputs(step, micro, rank(), samples=6)))
        engine.step()


def weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.iter_full("fp32")}


def settings_of_cells() -> Iterator[tuple[int, dict[str, Any], bool]]:
    """Every stage with values that between them meet each other in pairs."""
    precisions: list[dict[str, Any]] = [
        {},
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": True, "initial_scale_power": 6}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    ]
    for stage, turn in itertools.product((0, 1, 2, 3), (0, 1)):
        precision = precisions[(stage + 2 * turn) % 4]
        overlap = bool((stage + turn) % 2)
        accumulation = 1 + (stage // 2 + turn) % 2
        holds_back = accumulation == 2 and turn == 1
        clip = 0.05 if (stage * 3 + turn) % 2 else 0.0
        cell = {"accumulation": accumulation, "gradient_clipping": clip, "zero": {"overlap_comm": overlap}, **precision}
        yield stage, cell, holds_back


def _copy(cell: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in cell.items()}


@pytest.mark.parametrize("codec", ["sign", "int8", "int4"])
@on_ranks(2)
def test_each_combination_stays_within_its_bound(codec: str) -> None:
    for stage, cell, holds_back in settings_of_cells():
        what = f"{codec}, stage {stage}, {cell}, no_sync {holds_back}"
        plain, coded = make(stage, None, **_copy(cell)), make(stage, codec, **_copy(cell))
        first = weights(plain)
        for engine in (plain, coded):
            update(engine, 0, holds_back=holds_back)
        theirs, ours = weights(plain), weights(coded)
        assert not coded.optimizer.overflow, what
        assert same_on_all_ranks({name: value.double().sum().item() for name, value in ours.items()}), what
        moved = torch.cat([(theirs[name] - first[name]).view(-1) for name in first]).norm()
        apart = torch.cat([(theirs[name] - ours[name]).view(-1) for name in first]).norm()
        assert moved > 0 and apart > 0, what
        # Each rank's gradients are not far from the mean's size, and what is lost going out may be lost coming back.
        assert apart <= 4.0 * LOSES[codec] * moved, f"{what}: {apart / moved:.3f}"
        for name in ("frozen.weight", "frozen.bias"):
            assert torch.equal(ours[name], first[name]), what
        assert torch.equal(ours["table.weight"][USED_ROWS:], first["table.weight"][USED_ROWS:]), what
        plain.destroy()
        coded.destroy()


@on_ranks(2)
def test_an_unused_parameter_counts_as_zeros_and_overlap_changes_nothing() -> None:
    stages = (0, 2, 3)
    for stage in stages:
        runs = {
            "as it is": make(stage, "sign"),
            "zeros": make(stage, "sign", Awkward(zeros=True)),
            "late": make(stage, "sign", zero={"overlap_comm": False}),
        }
        for step in range(3):
            for engine in runs.values():
                update(engine, step)
        found = {name: weights(engine) for name, engine in runs.items()}
        for other in ("zeros", "late"):
            for name, value in found["as it is"].items():
                assert torch.equal(value, found[other][name]), f"stage {stage}, {other}: {name}"
        rows = found["as it is"]["table.weight"]
        assert torch.equal(rows[USED_ROWS:], Awkward().table.weight[USED_ROWS:])  # never named, never moved
        assert not torch.equal(rows[:USED_ROWS], Awkward().table.weight[:USED_ROWS])
        for engine in runs.values():
            engine.destroy()


@on_ranks(4)
def test_groups_of_neighbors() -> None:
    """Groups of ranks (hpZ, MiCS), and weights as codes: the same weights everywhere, and close to exact."""
    kinds = ("zero_hpz_partition_size", "mics_shard_size")
    for kind, weights_as in itertools.product(kinds, (None, "int8")):
        zero = {kind: 2}
        section = {"error_feedback": True, "weights": weights_as}
        coded, plain = make(3, "int8", zero=zero, section=section), make(3, None, zero=zero)
        first = weights(plain)
        for step in range(2):
            for engine in (coded, plain):
                update(engine, step)
        ours, theirs = weights(coded), weights(plain)
        assert same_on_all_ranks({name: value.double().sum().item() for name, value in ours.items()})
        moved = torch.cat([(theirs[name] - first[name]).view(-1) for name in first]).norm()
        apart = torch.cat([(theirs[name] - ours[name]).view(-1) for name in first]).norm()
        assert 0 < apart < (0.2 if weights_as else 0.05) * moved, f"{kind}, {weights_as}: {apart / moved:.4f}"
        coded.destroy()
        plain.destroy()
