"""Checkpoints of the original package with native experts, written here file by file as its layout is documented."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.checkpoint.upstream.partitioned import read_partitioned
from deepspeed.errors import CheckpointError
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.engine.support import engine_of, rank
from tests.harness import run_ranks
from tests.parallel.expert.models import build
from tests.parallel.expert.test_auto import adamw, config, of_this_rank
from tests.parallel.expert.test_layer import Net, logical

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


# -- stacked experts of Transformers models, taken apart --------------------------------------------------------------


def of_model() -> dict[str, dict[str, torch.Tensor]]:
    """Values of every parameter of a tiny Mixtral."""
    draws = torch.Generator().manual_seed(4)
    return {
        name: {key: torch.rand(p.shape, generator=draws) for key in ("fp32", *STATES)}
        for name, p in build("mixtral").named_parameters()
    }


def there(name: str) -> str:
    return name.replace("mlp.gate.weight", "mlp.router.gate.weight")


def taken_apart(values: dict[str, dict[str, torch.Tensor]], key: str, place: int) -> dict[str, torch.Tensor]:
    """The stacks of two of the four experts of each layer, as a rank has them."""
    found = {}
    for name, held in values.items():
        if ".experts." in name:
            block, mine = name.rpartition(".")[0], held[key][2 * place : 2 * place + 2]
            if name.endswith("gate_up_proj"):
                found[f"{block}.w1"], found[f"{block}.w3"] = mine.chunk(2, dim=1)
            else:
                found[f"{block}.w2"] = mine
    return found


def write_stacks(folder: Path, stage: int) -> None:
    """Two ranks that share the experts."""
    values, tag = of_model(), folder / "global_step7"
    tag.mkdir()
    (folder / "latest").write_text("global_step7")
    dense = {there(name): held for name, held in values.items() if ".experts." not in name}
    module = {name: held["fp32"] for name, held in dense.items()}
    module |= {name.replace("router.gate", "gate.gate"): value for name, value in module.items() if "router" in name}
    shapes = [
        {name: tuple(held["fp32"].shape) for name, held in dense.items()},
        {name: tuple(value.shape) for name, value in taken_apart(values, "fp32", 0).items()},
    ]
    facts = {"num_experts": [4, 4], "buffer_names": [], "param_shapes": shapes, "dp_world_size": 2, "global_steps": 7}
    facts |= {"ds_autoep_layers": [{"moe_layer_id": 0}], "global_samples": 28, "skipped_steps": 0}
    if stage == 3:
        empty = {name: torch.zeros(0) for name in module}
        for place in range(2):
            torch.save({"module": empty, **facts}, tag / f"zero_pp_rank_{place}_mp_rank_00_model_states.pt")
    else:
        torch.save({"module": module, **facts}, tag / "mp_rank_00_model_states.pt")
        for expert in range(4):
            stacks = taken_apart(values, "fp32", expert // 2)
            for layer in range(2):
                own = {f"{n}.{expert}": t[expert % 2].clone() for n, t in stacks.items() if f"layers.{layer}." in n}
                torch.save(own, tag / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt")
    for place in range(2):

        def flat(number: int, key: str, place: int = place) -> torch.Tensor:
            if number == 1:
                return torch.cat([value.flatten() for value in taken_apart(values, key, place).values()])
            wholes = [held[key].flatten() for held in dense.values()]
            wholes = wholes if stage == 3 else [torch.cat(wholes)]  # there every parameter is cut by itself
            return torch.cat([nn.functional.pad(whole, (0, len(whole) % 2)).chunk(2)[place] for whole in wholes])

        groups = [{"lr": 0.01, "params": [0]}, {"lr": 0.01, "params": [1], "moe": True, "name": "ep_size_2"}]
        state = {n: {**{key: flat(n, key) for key in STATES}, "step": torch.tensor(7.0)} for n in range(2)}
        inner = {"state": state, "param_groups": groups}
        masters = [flat(number, "fp32") for number in range(2)]
        if stage == 3:
            sharing = [{"partition_ranks": [0, 1]}, {"partition_ranks": [place]}]
            body = {"fp32_flat_groups": masters, "optimizer_state_dict": inner, "ds_zero_partition_groups": sharing}
            body["partition_count"] = 2
        else:
            body = {"single_partition_of_fp32_groups": masters, "base_optimizer_state": inner}
            body["partition_count"] = [2, 1]
        optim = {"optimizer_state_dict": {**body, "zero_stage": stage}}
        torch.save(optim, tag / f"zero_pp_rank_{place}_mp_rank_00_optim_states.pt")


def _load_stacks(folder: str, cells: list[tuple[int, int]]) -> None:
    expected = of_model()
    for ep_size, stage in cells:
        model = build("mixtral", seed=9)
        engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=config(stage, ep_size))[0]
        engine.load_checkpoint(folder)
        assert engine.global_steps == 7
        for name, parameter in engine.module.named_parameters():
            found = {"fp32": safe_get_full_fp32_param(parameter)}
            found |= {key: safe_get_full_optimizer_state(parameter, key) for key in STATES}
            for key, value in found.items():
                wanted = of_this_rank(parameter, expected[name][key], ep_size)
                assert torch.equal(value, wanted), f"{name} {key}, ep {ep_size}, stage {stage}"
            assert safe_get_full_optimizer_state(parameter, "step") == 7
        engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
def test_stacked_experts_load_at_any_spread(stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_stacks(Path(folder), stage)
        run_ranks(_load_stacks, 2, folder, [(2, 1), (1, 3)])


def test_missing_experts_are_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_stacks(Path(folder), 2)
        Path(folder, "global_step7", "layer_1_expert_2_mp_rank_00_model_states.pt").unlink()
        with pytest.raises(CheckpointError, match=r"expected all experts of .model.layers.1.mlp.experts.,.*0, 1, 3"):
            read_partitioned(Path(folder, "global_step7"), trust=False)
