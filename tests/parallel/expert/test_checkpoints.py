"""What was saved with experts spread over some ranks loads with any other spread, stage and number of ranks."""

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.engine.support import SHARDED, WIDTH, engine_of, rank
from tests.harness import run_ranks
from tests.parallel.expert.models import batch, build, transformers
from tests.parallel.expert.test_auto import adamw, config
from tests.parallel.expert.test_layer import Net, logical, tokens

STATES = ("exp_avg", "exp_avg_sq")


def native(ep_size: int, stage: int, **more: Any) -> Any:
    zero = dict(SHARDED) if stage == 3 else {}
    return engine_of(Net((ep_size, 1)), stage, zero={**zero, **more})


def transformers_model(ep_size: int, stage: int, **more: Any) -> Any:
    model = build("mixtral")
    settings = config(stage, ep_size)
    settings["zero_optimization"] |= more
    if not ep_size:  # the model as it is
        del settings["expert_parallel"]
    if stage == 3:
        settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)[0]


MAKERS = {"native": native, "transformers": transformers_model}


def train(engine: Any, kind: str, steps: range) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = engine(tokens(step, 0, 0)) if kind == "native" else engine(**batch(step, 0)).loss
        losses.append(loss.item())  # the same batch on every rank, so that their number does not matter
        engine.backward(loss)
        engine.step()
    return losses


def states(engine: Any, kind: str, ep_size: int) -> dict[str, dict[str, torch.Tensor]]:
    """Master and moments of what this rank has, by logical name; of stacked experts one by one."""
    named = logical(engine.module) if kind == "native" else dict(engine.module.named_parameters())
    found = {}
    for name, parameter in named.items():
        values = {"fp32": safe_get_full_fp32_param(parameter)}
        values |= {key: safe_get_full_optimizer_state(parameter, key) for key in STATES}
        if kind == "transformers" and ".experts." in name:
            local = len(values["fp32"])
            first = rank() % max(ep_size, 1) * local
            for number in range(local):
                found[f"{name}[{first + number}]"] = {key: value[number] for key, value in values.items()}
        else:
            found[name] = values
    return found


def _save(folder: str, kind: str, ep_size: int, stage: int) -> list[float]:
    engine = MAKERS[kind](ep_size, stage)
    train(engine, kind, range(2))
    engine.save_checkpoint(folder, tag="here")
    torch.save(states(engine, kind, ep_size), Path(folder, f"expected{rank()}.pt"))
    if kind == "transformers":
        engine.save_16bit_model(str(Path(folder, "exported")), "model.safetensors")
        engine.module.config.save_pretrained(Path(folder, "exported"))
    losses = train(engine, kind, range(2, 4))
    engine.destroy()
    return losses


def _load(folder: str, kind: str, saved_by: int, losses: list[float], cells: list[Any]) -> None:
    expected: dict[str, Any] = {}
    for number in range(saved_by):
        expected |= torch.load(Path(folder, f"expected{number}.pt"))
    for ep_size, stage, more in cells:
        engine = MAKERS[kind](ep_size, stage, **more)
        assert engine.load_checkpoint(folder, tag="here")[0] is not None
        for name, values in states(engine, kind, ep_size).items():
            for key, value in values.items():
                where, wanted = f"{name} {key} at ep {ep_size}, stage {stage}, {more}", expected[name][key]
                assert (value is None) == (wanted is None), where  # an expert without a token has no moments
                assert value is None or torch.equal(value, wanted), where
        assert train(engine, kind, range(2, 4)) == pytest.approx(losses, abs=1e-5)
        engine.destroy()


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
CELLS: list[tuple[int, int, list[tuple[int, int, list[Any]]]]] = [
    (2, 2, [(2, 2, [(1, 3, {}), (2, 0, {}), (2, 3, OFFLOADED)]), (1, 1, [(1, 1, {})])]),
]
LONG = [
    (2, 0, [(4, 4, [(1, 2, {}), (2, 3, {}), (4, 1, OFFLOADED)])]),
    (2, 3, [(4, 4, [(2, 1, {}), (4, 0, {})]), (1, 1, [(1, 3, {})])]),
]


def _check(kind: str, saves: Any) -> None:
    for ep_size, stage, loads in saves:
        with tempfile.TemporaryDirectory() as folder:
            losses = run_ranks(_save, 2, folder, kind, ep_size, stage)[0]
            _check_exports(folder, kind)
            for world, _, cells in loads:
                run_ranks(_load, world, folder, kind, 2, losses, cells)


def _check_exports(folder: str, kind: str) -> None:
    """Everything that reads a checkpoint without ranks finds every expert."""
    expected = torch.load(Path(folder, "expected0.pt")) | torch.load(Path(folder, "expected1.pt"))
    consolidated = get_fp32_state_dict_from_zero_checkpoint(folder, "here")
    for name, values in expected.items():
        base, _, number = name.partition("[")
        found = consolidated[base][int(number[:-1])] if number else consolidated[base]
        assert torch.equal(found, values["fp32"]), name
    if kind == "transformers":
        again, report = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder, "exported"), attn_implementation="eager", output_loading_info=True, dtype=torch.float32
        )
        assert not report["missing_keys"] and not report["unexpected_keys"], report
        for name, parameter in again.named_parameters():
            assert torch.equal(parameter, consolidated[name]), name


@pytest.mark.parametrize("kind", MAKERS)
def test_any_spread_loads_any_other(kind: str) -> None:
    _check(kind, CELLS)


def test_the_model_as_it_is_loads_a_spread_one_and_the_other_way_round() -> None:
    _check("transformers", [(0, 1, [(2, 2, [(2, 1, {})])]), (2, 1, [(1, 1, [(0, 1, {})])])])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_more_spreads_load_others(kind: str) -> None:
    _check(kind, LONG)


def _plain_module(path: str) -> None:
    engine = transformers_model(2, 3)
    state = engine._consolidated_16bit_state_dict()
    if rank() == 0:
        assert state is not None
        torch.save(state, path)


def test_a_full_state_dict_fits_the_model_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    run_ranks(_plain_module, 2, str(path))
    model: nn.Module = build("mixtral", seed=3)
    model.load_state_dict(torch.load(path))
    for name, parameter in build("mixtral").named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name


class Counting(nn.Module):
    """An expert with a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("mark", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.mark[0]


class Marked(nn.Module):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.block = MoE(WIDTH, Counting(WIDTH), 4, ep_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)[0].square().mean()


def _marks(engine: Any) -> list[float]:
    return [expert.mark[0].item() for expert in engine.module.block.deepspeed_moe.experts.deepspeed_experts]


def _save_marked(folder: str) -> None:
    engine = engine_of(Marked(2), 1)
    for number, expert in enumerate(engine.module.block.deepspeed_moe.experts.deepspeed_experts):
        expert.mark.fill_(1 + 2 * rank() + number)
    engine.save_checkpoint(folder, tag="here")
    full = engine._consolidated_16bit_state_dict()
    if rank() == 0:
        names = [f"block.deepspeed_moe.experts.deepspeed_experts.{number}.mark" for number in range(4)]
        assert [full[name][0].item() for name in names] == [1, 2, 3, 4]
    engine.destroy()
    engine = engine_of(Marked(2), 1)
    engine.load_checkpoint(folder)
    assert _marks(engine) == [1 + 2 * rank(), 2 + 2 * rank()]
    engine.destroy()
    with mock.patch("deepspeed.parallel.expert.prepare.set_logical_name"):  # as earlier releases saved
        engine = engine_of(Marked(2), 1)
    for expert in engine.module.block.deepspeed_moe.experts.deepspeed_experts:
        expert.mark.fill_(7)
    engine.save_checkpoint(folder, tag="earlier", save_latest=False)
    engine.destroy()
    engine = engine_of(Marked(2), 1)
    engine.load_checkpoint(folder, tag="earlier")
    assert _marks(engine) == ([0, 0] if rank() else [7, 7])


def _load_marked(folder: str) -> None:
    engine = engine_of(Marked(1), 1)
    engine.load_checkpoint(folder)
    assert _marks(engine) == [1, 2, 3, 4]


def test_buffers_of_experts_are_saved_by_all_ranks_that_have_them(tmp_path: Path) -> None:
    run_ranks(_save_marked, 2, str(tmp_path))
    run_ranks(_load_marked, 1, str(tmp_path))
