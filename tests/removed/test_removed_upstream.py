"""Each section that release 0.19.8 of the original removed: what is published is read, and trains as it did.

Losses equal those recorded from release 0.19.6 where it runs on CPUs. Otherwise they equal the rule of the paper in
plain torch: 1-bit optimizers and LoCo need CUDA there, MiCS NCCL, sparse attention Triton, MoQ fp16. Layer dropping is
compared with plain torch too, since 0.19.6 moves a dropped layer by its momentum.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.compression import compression_state
from deepspeed.config.__main__ import main
from deepspeed.engine import initialize
from deepspeed.ops.sparse_attention import FixedSparsityConfig, SparseSelfAttention
from tests.compression import test_pacing as pacing
from tests.compression.test_rounding import formula
from tests.engine import test_zero_plus_plus as zero_plus_plus
from tests.engine.support import engine_of, inputs, rank
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import tower
from tests.ops.sparse_attention.definitions import layout_of, masked_dense
from tests.removed.programs import PUBLISHED, RECORDED, VOCABULARY, encoder, losses_of, mean_of, shortened, tokens_of
from tests.zero.onebit import simulated

STEPS = 6
PAGE = Path(__file__).parents[2] / "docs" / "migrating" / "removed-upstream.md"
KEYS = {
    "1-bit Adam": "optimizer.type",
    "1-bit LAMB": "optimizer.type",
    "0/1 Adam": "optimizer.type",
    "MiCS": "zero_optimization.mics_shard_size",
    "LoCo": "zero_optimization.zeropp_loco_param",
}
"""By the name of a configuration, its removed key; others are named after their section."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_file_is_in_order(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, key = tmp_path / "ds_config.json", KEYS.get(name, name)
    path.write_text(json.dumps(PUBLISHED[name]))
    assert main(["check", str(path)]) == 0
    release = "0.6.8" if name == "quantize_training" else "0.19.8"  # read no longer, and refused since 0.19.8
    assert f"  - {key}: removed in {release}, works here\n" in capsys.readouterr().out
    assert f"`{key}`" in PAGE.read_text()


@pytest.mark.parametrize(
    ("key", "section", "code", "instead"),
    [
        ("amp.enabled", {"amp": {"enabled": True, "opt_level": "O1"}}, 1, "fp16"),
        ("nebula.enabled", {"nebula": {"enabled": True}}, 1, "save_checkpoint"),
        ("graph_harvesting", {"graph_harvesting": True}, 0, "fused"),
    ],
)
def test_what_does_not_exist_says_what_to_use(
    key: str, section: dict[str, Any], code: int, instead: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8, **section}))
    assert main(["check", str(path)]) == code
    line = next(line for line in capsys.readouterr().out.splitlines() if key in line)
    assert instead in line and "works here" not in line
    assert f"`{key.partition('.')[0]}`" in PAGE.read_text()


@pytest.mark.parametrize("name", RECORDED)
def test_losses_are_those_of_the_original(name: str) -> None:
    assert run_ranks(losses_of, 2, name)[0] == pytest.approx(RECORDED[name], rel=1e-5)


# -- the same model in plain torch -------------------------------------------------------------------------------------


def plain_losses(
    name: str, ranks: int, arguments: Callable[[int], dict[str, Any]], weights_of: Callable[[nn.Module, int], Any]
) -> list[float]:
    """Trains the encoder in one process with the mean loss of all ranks, by torch's AdamW."""
    config, model, found = shortened(name), encoder(), []
    params = {key: value for key, value in config["optimizer"]["params"].items() if key != "torch_adam"}
    optimizer = torch.optim.AdamW(model.parameters(), **params)
    for step in range(STEPS):
        losses = []
        for of_rank in range(ranks):
            model.forwards = step  # each rank draws by the number of its own forwards
            values, tokens = weights_of(model, step), tokens_of(step, 0, of_rank)
            losses.append(torch.func.functional_call(model, values, (tokens,), arguments(step)))
        mean = torch.stack(losses).mean()
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.get("gradient_clipping", 1.0))
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean.item())
    return found


def test_mics_is_plain_data_parallelism() -> None:
    found = run_ranks(losses_of, 4, "MiCS")[0]
    assert found == pytest.approx(plain_losses("MiCS", 4, lambda step: {}, lambda model, step: {}), rel=1e-5)


def test_layers_are_dropped_by_the_rule() -> None:
    section = shortened("progressive_layer_drop")["progressive_layer_drop"]
    theta, gamma = section["theta"], section["gamma"]

    def arguments(step: int) -> dict[str, Any]:
        kept = (1 - theta) * math.exp(-gamma * max(step - 1, 0)) + theta
        return {"progressive_layer_drop": True, "pld_theta": kept}

    found = run_ranks(losses_of, 2, "progressive_layer_drop")[0]
    assert found == pytest.approx(
        plain_losses("progressive_layer_drop", 2, arguments, lambda model, step: {}), rel=1e-5
    )


def rounded(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Returns the weights of a step of MoQ: symmetric rounding in groups, of which an embedding has one a row."""
    if step == 0:
        return {}
    bits = pacing.bits_of([[0.0, 1.0]] * STEPS, 0)[step - 1]
    found = {}
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            groups = weight.detach().reshape(VOCABULARY if name.startswith("embeddings") else 8, -1)
            value = torch.tensor([formula(group, bits, True) for group in groups]).view_as(weight)
            found[name] = weight + (value - weight).detach()
    return found


def test_widths_of_moq_fall_by_the_rule() -> None:
    found = run_ranks(losses_of, 1, "quantize_training")[0]
    assert found == pytest.approx(plain_losses("quantize_training", 1, lambda step: {}, rounded), rel=1e-5)


@on_ranks(2)
def test_eigenvalues_pace_the_widths() -> None:
    """As MoQ's tutorial has it: the section eigenvalue beside the widths that it paces."""
    widths = {key: value for key, value in pacing.moq().items() if key != "eigenvalue"}
    engine = engine_of(pacing.uneven(), 0, quantize_training=widths, **shortened("eigenvalue"))
    cell = pacing.CELLS[0]
    rows = pacing.train(engine, cell, range(STEPS))
    batches = [pacing.batch(cell, 0, 0, of_rank) for of_rank in range(2)]
    section = shortened("eigenvalue")["eigenvalue"]
    settings = {key: section[key] for key in ("max_iter", "tol", "stability")}
    assert rows[0][0] == pytest.approx(pacing.of_one_process(pacing.uneven(), batches, **settings), rel=1e-3)
    for block in range(2):
        assert [row[1][block] for row in rows] == pacing.bits_of([row[0] for row in rows], block)
    assert {state.bits for state in compression_state(engine.module)} != {pacing.BITS}


# -- optimizers and LoCo, by the definitions of the papers -------------------------------------------------------------


def simulation_of(name: str, config: dict[str, Any], engine: Any) -> Any:
    params, messages = config["optimizer"]["params"], simulated.messages_of(engine, 2)
    common = {"lr": params["lr"], "decay": params.get("weight_decay", 0.0), "eps": 1e-8}
    common["clip"] = config.get("gradient_clipping", 1.0)
    if name == "0/1 Adam":
        schedule = {"freeze": 4, "kappa": 1, "double_after": 2, "most": 3}
        return simulated.ZeroOneAdam(tower(), messages, **schedule, **common, precondition=True)
    made = {"1-bit Adam": simulated.OneBitAdam, "1-bit LAMB": simulated.OneBitLamb}[name]
    simulation: Any = made(tower(), messages, freeze=params["freeze_step"], **common, precondition=name == "1-bit Adam")
    simulation.bounds = (params.get("min_coeff", 0.0), params.get("max_coeff", 0.0))
    return simulation


def one_bit(name: str) -> tuple[list[float], list[float]]:
    config = shortened(name)
    engine = initialize(model=tower(), config=config)[0]
    simulation = simulation_of(name, config, engine)
    found, expected = [], []
    for step in range(STEPS):
        losses: list[float] = []

        def loss_of(model: nn.Module, of_rank: int, step: int = step, losses: list[float] = losses) -> torch.Tensor:
            loss = model(inputs(step, of_rank))
            losses.append(loss.item())
            return loss

        loss = engine(inputs(step, rank()))
        engine.backward(loss)
        engine.step()
        found.append(mean_of([loss]))
        simulation.step(simulation.gradients(loss_of))
        expected.append(sum(losses) / len(losses))
    return found, expected


@pytest.mark.parametrize("name", ["1-bit Adam", "1-bit LAMB", "0/1 Adam"])
def test_an_optimizer_of_one_bit_follows_its_paper(name: str) -> None:
    found, expected = run_ranks(one_bit, 2, name)[0]
    assert found == pytest.approx(expected, rel=1e-4)


def loco() -> tuple[list[float], list[float]]:
    zero = shortened("LoCo")["zero_optimization"]
    engine = zero_plus_plus.make(tower(), zero={key: value for key, value in zero.items() if key != "stage"})
    section = zero["zeropp_loco_param"]
    simulation = zero_plus_plus.Simulation(engine, 2, 2, section["err_beta"])
    found, expected = [], []
    for step in range(STEPS):
        expected.append(sum(simulation.model(inputs(step, of_rank)).item() for of_rank in range(2)) / 2)
        loss = engine(inputs(step, rank()))
        engine.backward(loss)
        engine.step()
        found.append(mean_of([loss]))
        simulation.step(step)
        if (step + 1) % section["reset_T"] == 0:
            simulation.forget()
    return found, expected


def test_loco_follows_its_paper() -> None:
    found, expected = run_ranks(loco, 2)[0]
    assert found == pytest.approx(expected, rel=1e-4)


# -- sparse attention --------------------------------------------------------------------------------------------------

TOKENS, HEADS, HEAD = 128, 4, 4


class Attending(nn.Module):
    """One attention layer; returns the loss."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv, self.out, self.attend = nn.Linear(8, 3 * HEADS * HEAD), nn.Linear(HEADS * HEAD, 8), attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        return (self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)) - x).square().mean()


def sparse() -> tuple[list[float], list[float]]:
    config = shortened("sparse_attention")
    section = {key: value for key, value in config["sparse_attention"].items() if key != "mode"}
    pattern = FixedSparsityConfig(num_heads=HEADS, **section)
    layout = layout_of(pattern, TOKENS)
    ours = Attending(SparseSelfAttention(pattern, max_seq_length=TOKENS))
    plain = Attending(lambda q, k, v: masked_dense(q, k, v, layout, pattern.block))
    assert 0 < layout.float().mean() < 0.7
    engine = engine_of(ours, 0, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), **config)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    found, expected = [], []
    for step in range(STEPS):
        x = torch.randn(2, TOKENS, 8, generator=torch.Generator().manual_seed(step))
        loss, other = engine(x), plain(x)
        engine.backward(loss)
        engine.step()
        other.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        expected.append(other.item())
    return found, expected


def test_sparse_attention_is_dense_attention_under_its_mask() -> None:
    found, expected = run_ranks(sparse, 1)[0]
    assert found == pytest.approx(expected, rel=1e-5)
