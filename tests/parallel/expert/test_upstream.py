"""Checkpoints of the original package with native experts, written here file by file as its layout is documented."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import CheckpointError
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.engine.support import engine_of, rank
from tests.harness import run_ranks
from tests.parallel.expert.test_parity import Net, logical

STATES = ("exp_avg", "exp_avg_sq")


def saved(stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """Values of every parameter: weights and moments."""
    draws = torch.Generator().manual_seed(3)
    return {
        name: {key: torch.rand(p.shape, generator=draws) for key in ("fp32", *(STATES if stage else ()))}
        for name, p in Net((1, 1)).named_parameters()
    }


def write(folder: Path, stage: int) -> None:
    """Two ranks that share four experts of each of two layers; both hold two."""
    values, tag = saved(stage), folder / "global_step7"
    tag.mkdir()
    (folder / "latest").write_text("global_step7")
    is_expert = {name: "deepspeed_experts" in name for name in values}
    module = {name: held["fp32"] for name, held in values.items() if not is_expert[name]}
    local = [name for name in values if is_expert[name] and int(name.split("deepspeed_experts.")[1][0]) < 2]
    shapes = [
        {name: values[name]["fp32"].shape for name in names}
        for names in ([name for name in values if not is_expert[name]], local)
    ]
    counters = {"global_steps": 7, "global_samples": 28, "skipped_steps": 0, "dp_world_size": 2}
    model = {"module": module, "num_experts": [4, 4], "buffer_names": [], "param_shapes": shapes, **counters}
    torch.save(model, tag / "mp_rank_00_model_states.pt")
    for layer in range(2):
        for expert in range(4):
            mine = f"blocks.{layer}.deepspeed_moe.experts.deepspeed_experts.{expert}."
            weights = {name: held["fp32"] for name, held in values.items() if name.startswith(mine)}
            torch.save(weights, tag / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt")
    for place in range(2 if stage else 0):
        _write_states(tag / f"zero_pp_rank_{place}_mp_rank_00_optim_states.pt", values, shapes, place, stage)


def _write_states(path: Path, values: Any, shapes: list[dict[str, Any]], place: int, stage: int) -> None:
    def there(name: str) -> dict[str, torch.Tensor]:
        before, mark, after = name.partition("deepspeed_experts.")
        return values[f"{before}{mark}{int(after[0]) + 2 * place}{after[1:]}" if mark else name]

    def flat(number: int, key: str) -> torch.Tensor:
        whole = torch.cat([there(name)[key].flatten() for name in shapes[number]])
        if number == 1:
            return whole  # held by this rank alone
        whole = nn.functional.pad(whole, (0, -len(whole) % 4))
        return whole.chunk(2)[place].clone()

    groups = [{"lr": 0.01, "params": [0]}, {"lr": 0.01, "params": [1], "moe": True, "name": "ep_size_2"}]
    state = {n: {**{key: flat(n, key) for key in STATES}, "step": torch.tensor(7.0)} for n in range(2)}
    torch.save(
        {
            "optimizer_state_dict": {
                "single_partition_of_fp32_groups": [flat(number, "fp32") for number in range(2)],
                "base_optimizer_state": {"state": state, "param_groups": groups},
                "zero_stage": stage,
                "partition_count": [2, 1],
            }
        },
        path,
    )


def _load(folder: str, stage: int, cells: list[tuple[int, int]]) -> None:
    expected = saved(stage)
    for ep_size, ours in cells:
        engine = engine_of(Net((ep_size, 1)), ours)
        engine.load_checkpoint(folder)
        assert engine.global_steps == 7
        for name, parameter in logical(engine.module).items():
            assert torch.equal(safe_get_full_fp32_param(parameter), expected[name]["fp32"]), name
            for key in STATES if stage else ():
                assert torch.equal(safe_get_full_optimizer_state(parameter, key), expected[name][key]), f"{name} {key}"
            if stage:
                assert safe_get_full_optimizer_state(parameter, "step") == 7
        engine.destroy()
    assert rank() < 2


@pytest.mark.parametrize("stage", [0, 2])
def test_native_experts_load_at_any_spread(stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), stage)
        run_ranks(_load, 2, folder, stage, [(2, 2), (1, 3)])


def test_stacked_experts_are_refused_by_name(tmp_path: Path) -> None:
    from deepspeed.checkpoint.upstream.experts import expert_weights

    path = tmp_path / "layer_0_expert_0_mp_rank_00_model_states.pt"
    torch.save({"model.layers.0.mlp.experts.w1.0": torch.zeros(2, 2)}, path)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.experts\.w1\.0', one of the stacked experts"):
        expert_weights([path], trust=False)
