"""Optimizer states of parameters without dimensions, in checkpoints of the original package."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from tests.harness import on_ranks


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.layer = nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.gain).square().mean()


def _model() -> Gated:
    torch.manual_seed(0)
    return Gated()


def _input(step: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(step))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(_input(step)).backward()
        optimizer.step()


def _states(model: nn.Module) -> dict[str, Any]:
    return {
        "module": copy.deepcopy(model.state_dict()),
        "buffer_names": [],
        "param_shapes": [{name: parameter.shape for name, parameter in model.named_parameters()}],
        "global_steps": 2,
        "skipped_steps": 0,
        "dp_world_size": 1,
    }


def _save_stage_0(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    folder.mkdir()
    states = {**_states(model), "optimizer": copy.deepcopy(optimizer.state_dict())}
    torch.save(states, folder / "mp_rank_00_model_states.pt")


def _save_universal(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    folder.mkdir()
    torch.save(_states(model), folder / "mp_rank_00_model_states.pt")
    for name, parameter in model.named_parameters():
        place = folder / "zero" / name
        place.mkdir(parents=True)
        torch.save({"param": parameter.detach().clone()}, place / "fp32.pt")
        for key, value in optimizer.state[parameter].items():
            torch.save(value if key == "step" else {"param": value}, place / f"{key}.pt")
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    torch.save({"param_groups": groups}, folder / "zero" / "optimizer_state.pt")


_SAVE = {"stage 0": _save_stage_0, "universal": _save_universal}


@pytest.mark.parametrize("layout", _SAVE)
@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(1)
def test_training_continues_with_the_moments_of_a_scalar(tmp_path: Path, layout: str, stage: int) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _train(model, optimizer, range(2))
    _SAVE[layout](tmp_path / "tag", model, optimizer)
    _train(model, optimizer, range(2, 4))
    fresh = _model()
    engine, *_ = deepspeed.initialize(
        model=fresh,
        optimizer=torch.optim.AdamW(fresh.parameters(), lr=0.1),
        config={"train_batch_size": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}},
    )
    engine.load_checkpoint(tmp_path, tag="tag")
    for step in range(2, 4):
        engine.backward(engine(_input(step)))
        engine.step()
    for (name, expected), found in zip(model.named_parameters(), engine.module.parameters(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)
