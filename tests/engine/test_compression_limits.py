"""Gradients that are not finite or all zeros, tensors of one element, and phases that begin at awkward moments."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.engine import DeepSpeedEngine, initialize
from deepspeed.logging import logger
from tests.engine.support import WIDTH, inputs, rank, same_on_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.onebit.test_adam import Lines

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "sign": (2, {"communication_compression": {"gradients": "sign", "block": 64}}),
    "sign later": (0, {"communication_compression": {"gradients": "sign", "start_step": 2, "warm_up": "int8"}}),
    "int8": (3, {"communication_compression": {"gradients": "int8", "error_feedback": True}}),
    "int4": (1, {"communication_compression": {"gradients": "int4"}}),
    "ZeRO++": (3, {"zero_optimization": {"zero_quantized_weights": True, "zero_quantized_gradients": True}}),
    "1-bit Adam": (0, {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "eps": 1e-3, "freeze_step": 2}}}),
    "1-bit Adam, sharded": (
        2,
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "eps": 1e-3, "freeze_step": 2}}},
    ),
    "1-bit LAMB": (0, {"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "eps": 1e-3, "freeze_step": 2}}}),
    "0/1 Adam": (
        0,
        {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.01, "eps": 1e-3, "var_freeze_step": 2}}},
    ),
}


class Tiny(nn.Module):
    """Tensors of one element, a layer whose gradients are zeros, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.tensor(0.1))
        self.zeros, self.unused = nn.Linear(WIDTH, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x.to(self.layer.bias.dtype))) * self.scale + self.shift
        return x.float().square().mean() + 0.0 * self.zeros(x).float().sum()


def make(name: str, **more: Any) -> DeepSpeedEngine:
    stage, option = WAYS[name]
    zero = {"stage": stage, **option.get("zero_optimization", {})}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-3}},
        "fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1},
        **option,
        "zero_optimization": zero,
        **more,
    }
    return initialize(model=Tiny(), config=config)[0]


def step(engine: DeepSpeedEngine, number: int, boost: float = 1.0, *, holds_back: bool = False) -> None:
    for micro in range(engine.gradient_accumulation_steps()):
        last = micro == engine.gradient_accumulation_steps() - 1
        with engine.no_sync() if holds_back and not last else nullcontext():
            engine.backward(engine(inputs(number, micro, rank())) * (boost if rank() == 0 else 1.0))
        engine.step()


def weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.iter_full("fp32")}


@on_ranks(1, 3, timeout=180)
def test_what_is_not_finite_changes_nothing_and_phases_continue(tmp_path: Path) -> None:
    names = list(WAYS)
    folder = str(tmp_path)
    for name in names:
        engine = make(name)
        first = weights(engine)
        for number, boost in enumerate((1.0, math.inf, 1.0, math.nan, 1.0, 1.0)):
            # Update 3 is the first of the second phase; the one before it was skipped, and so is the one after.
            before = weights(engine)
            step(engine, number, boost)
            after = weights(engine)
            what = f"{name}, update {number + 1}"
            assert engine.optimizer.overflow is not math.isfinite(boost), what
            assert all(torch.equal(before[key], after[key]) for key in before) is not math.isfinite(boost), what
            assert all(bool(value.isfinite().all()) for value in after.values()), what
            for key in ("unused.weight", "unused.bias"):
                assert torch.equal(after[key], first[key]), what
            assert (after["layer.weight"] - first["layer.weight"]).abs().max() < 1, what
            if number == 1:  # just before the phase changes
                engine.save_checkpoint(f"{folder}/{name.replace('/', '-')}")
        assert same_on_all_ranks({key: value.double().sum().item() for key, value in weights(engine).items()}), name
        again = make(name)
        again.load_checkpoint(f"{folder}/{name.replace('/', '-')}")
        for number, boost in ((2, 1.0), (3, math.nan), (4, 1.0), (5, 1.0)):
            step(again, number, boost)
        expected, found = weights(engine), weights(again)
        assert all(torch.equal(value, found[key]) for key, value in expected.items()), name
        engine.destroy()
        again.destroy()


@on_ranks(2)
def test_accumulation_with_no_sync() -> None:
    """no_sync is accumulation: at stages without sharded gradients bit for bit."""
    names = ["sign later", "int4", "1-bit Adam", "1-bit Adam, sharded", "1-bit LAMB", "0/1 Adam"]
    for name in names:
        found = []
        for holds_back in (False, True):
            engine = make(name, gradient_accumulation_steps=2)
            for number in range(4):
                step(engine, number, holds_back=holds_back)
            found.append(weights(engine))
            engine.destroy()
        for key, value in found[0].items():
            assert torch.equal(value, found[1][key]), (name, key)


def moved(folder: str, saves: bool) -> None:
    """Checkpoints between sizes and between with and without codes; what is lost of errors is logged in one line."""
    lines = Lines()
    logger.addHandler(lines)
    names = ["sign", "int4", "1-bit Adam"]
    for name in names:
        if saves:
            engine = make(name)
            for number in range(3):
                step(engine, number)
            engine.save_checkpoint(f"{folder}/{name}")
            engine.destroy()
            continue
        saved: dict[str, torch.Tensor] | None = None
        for more in ({}, {"communication_compression": {}}) if name != "1-bit Adam" else ({},):
            engine = make(name, **more)
            lines.texts.clear()
            engine.load_checkpoint(f"{folder}/{name}")
            texts = sum("starts from zero" in line for line in lines.texts)
            assert texts == (rank() == 0 and not more), name
            mine = weights(engine)
            assert saved is None or all(torch.equal(value, mine[key]) for key, value in saved.items())
            saved = mine
            step(engine, 3)
            assert engine.global_steps == 4 and all(bool(v.isfinite().all()) for v in weights(engine).values())
            engine.destroy()
    logger.removeHandler(lines)


def test_checkpoints_between_sizes_and_ways(tmp_path: Path) -> None:
    run_ranks(moved, 3, str(tmp_path), True)
    run_ranks(moved, 2, str(tmp_path), False)
