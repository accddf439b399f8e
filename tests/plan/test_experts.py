"""Plans of mixtures of experts against real ranks, whose tokens go to all experts alike."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import deepspeed
from deepspeed.cli.plan import main
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.expert import spread
from deepspeed.parallel.expert.dispatch import plan_routes
from deepspeed.parallel.expert.gate import TopKGate
from deepspeed.plan import DecoderShape
from deepspeed.plan.decoder import Decoder
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind
from tests.ecosystem.support import needs_transformers
from tests.harness import run_ranks
from tests.plan.along import assert_as_counted, count_step
from tests.plan.cells import SAMPLES, TOKENS, Cell

SHAPE = DecoderShape(layers=2, hidden=128, heads=4, vocab=512, intermediate=256, experts=8, experts_per_token=2)
RANKS = 4


@pytest.fixture
def _even_plan() -> Iterator[None]:
    """Plans as the tokens of the real ranks below choose: all experts of a token are on one rank."""
    with patch(
        "deepspeed.parallel.expert.dispatch.expected_rows", lambda tokens, _choices, _experts, size: tokens // size
    ):
        yield


def _planned(cell: Cell, ep: int, **more: Any) -> Any:
    return deepspeed.plan(
        SHAPE,
        cell.config(""),
        devices_per_node=RANKS,
        device="cpu",
        device_memory="8GiB",
        sequence_length=TOKENS,
        compare_checkpointing=False,
        ep=ep,
        **more,
    )


def _evenly(routes: Any) -> Any:
    """The gate's work, but for its choice: tokens take the experts in turn."""

    def even(self: TopKGate, *args: Any) -> Any:
        found = routes(self, *args)
        return replace(found, indices=torch.arange(found.indices.numel()).view_as(found.indices) % found.num_experts)

    return even


def _measure(cells: list[tuple[Cell, int]]) -> list[dict[str, Any]]:
    routes = TopKGate.routes
    TopKGate.routes = _evenly(routes)
    try:
        return [_run(*cell) for cell in cells]
    finally:
        TopKGate.routes = routes


def _run(cell: Cell, ep: int) -> dict[str, Any]:
    torch.manual_seed(0)
    return count_step(Decoder(replace(SHAPE, expert_ranks=ep)), cell.config(""), TOKENS)


def _compare(cells: list[tuple[Cell, int]]) -> None:
    real = run_ranks(_measure, RANKS, cells, timeout=100 * len(cells))
    for number, (cell, ep) in enumerate(cells):
        assert_as_counted(_planned(cell, ep, rank=1), real[1][number], (cell, ep))


def _mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return transformers.MixtralConfig(**sizes, **heads, **experts, use_cache=False)


def _spread_cells() -> list[dict[str, Any]]:
    section = (("expert_parallel", {"enabled": True, "autoep_size": 2}),)
    return [Cell(1, accumulation=2, more=section).config(""), Cell(3, more=section).config("")]


def _measure_spread() -> list[dict[str, Any]]:
    from transformers import MixtralForCausalLM

    def evenly(indices: torch.Tensor, num_experts: int, transport: Any) -> Any:
        return plan_routes(torch.arange(indices.numel()).view_as(indices) % num_experts, num_experts, transport)

    found = []
    with patch.object(spread, "plan_routes", evenly):
        for config in _spread_cells():
            torch.manual_seed(0)
            found.append(count_step(MixtralForCausalLM(_mixtral()).train(), config, TOKENS))
    return found


@needs_transformers
@pytest.mark.usefixtures("_even_plan")
def test_a_model_whose_experts_the_configuration_spreads():
    real = run_ranks(_measure_spread, 2, timeout=200)
    for number, config in enumerate(_spread_cells()):
        plan = deepspeed.plan(
            _mixtral(),
            config,
            devices_per_node=2,
            device="cpu",
            device_memory="8GiB",
            sequence_length=TOKENS,
            compare_checkpointing=False,
            rank=1,
        )
        assert_as_counted(plan, real[1][number], config)


@pytest.mark.parametrize(
    # The last one runs after models whose layers talked in their backward, as if there had been none.
    "cells",
    [
        [(Cell(3), 4), (Cell(0, accumulation=2), 1)],
        pytest.param([(Cell(1, accumulation=2), 2)], marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("_even_plan")
def test_against_real_ranks(cells):
    _compare(cells)


@pytest.mark.slow
@pytest.mark.usefixtures("_even_plan")
def test_against_real_ranks_at_every_stage():
    _compare([(Cell(stage, accumulation=2), ep) for ep in (4, 2, 1) for stage in range(4)])


def test_what_is_sent_is_the_formula():
    """Each token once to each rank, each way, in forward and in backward; pairs of routes, and the counts."""
    for ep in (2, 4):
        calls, nbytes = _planned(Cell(1), ep).simulated.flow.requested_along["all_to_all", "expert"]
        tokens, choices = SAMPLES * TOKENS, SHAPE.experts_per_token
        others = SHAPE.experts - SHAPE.experts // ep
        rows = round(tokens * (1 - math.comb(others, choices) / math.comb(SHAPE.experts, choices)))
        pairs = -(-16 * tokens * choices // ep // (2 * SHAPE.hidden))
        expected = (SHAPE.experts // ep + 1) * 8 * (ep - 1)
        sent = (ep - 1) * (rows + pairs) * SHAPE.hidden * 2
        assert calls == SHAPE.layers * 5 and nbytes == SHAPE.layers * (4 * sent + expected)


def test_a_plan_does_not_change_the_next():
    """Layers of simulated ranks that talk in their backward are no layers of another plan, or of this process's job."""
    dense = {"devices_per_node": 2, "device": "cpu", "device_memory": "8GiB", "sequence_length": TOKENS}
    shape = DecoderShape(layers=3, hidden=128, heads=4, vocab=512)
    before = deepspeed.plan(shape, Cell(1).config(""), **dense).simulated
    _planned(Cell(1), 2)
    after = deepspeed.plan(shape, Cell(1).config(""), **dense).simulated
    assert after.kind_peaks == before.kind_peaks and after.peaks == before.peaks


def test_which_size_fits(capsys):
    sizes = [_planned(Cell(1), ep) for ep in (1, 2, 4)]
    assert [plan.parameters for plan in sizes] == [sizes[0].parameters] * 3
    held = [plan.simulated.kind_peaks[StorageKind.COMPUTE, Tier.DEVICE] for plan in sizes]
    of_experts = SHAPE.layers * SHAPE.experts * 3 * SHAPE.hidden * SHAPE.width * 2
    assert held[0] - held[1] == of_experts // 2 and held[1] - held[2] == of_experts // 4
    spread = deepspeed.plan(SHAPE, Cell(1).config(""), nodes=2, devices_per_node=2, ep=4, suggest=False)
    travel = next(row for row in spread.transfers if row.name == "all_to_all")
    assert travel.between == pytest.approx(2 * travel.inside, abs=2)  # two of the three others are on the other node
    model = ["--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "256", "--experts", "4"]
    assert main([*model, "--devices", "4", "--sequence-length", "64", "--sweep", "ep=1,2,3,4"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("yes") == 3 and "choose ep_size" in printed
    with pytest.raises(DeepSpeedConfigError, match="experts-per-token: expected 1 to 4"):
        DecoderShape(1, 64, 4, 256, experts=4, experts_per_token=5)


@pytest.mark.parametrize("experts", [0, 8])
def test_dropout_keeps_its_masks(experts):
    """Forward keeps a mask of one byte per element for each of the two sums with the residual stream of a block."""
    shape = replace(SHAPE, experts=experts)
    plain, dropped = (
        deepspeed.plan(replace(shape, dropout=rate), Cell(0).config(""), sequence_length=TOKENS, suggest=False)
        for rate in (0.0, 0.1)
    )
    masks = 2 * SHAPE.layers * SAMPLES * TOKENS * SHAPE.hidden
    assert dropped.simulated.activations - plain.simulated.activations == pytest.approx(masks, rel=0.1)


@needs_transformers
@pytest.mark.parametrize(("precision", "halves"), [("bf16", 7), ("fp32", 6)])
def test_products_by_groups_count(precision, halves):
    """Experts of Transformers multiply all tokens in one product by groups, which torch's own table does not have."""
    from transformers import MixtralConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    made = deepspeed.plan(
        MixtralConfig(**sizes),
        Cell(0, precision=precision).config(""),
        sequence_length=32,
        compare_checkpointing=False,
        suggest=False,
    )
    tokens, projections, experts = 2 * 32, 64 * (2 * 64 + 2 * 32), 64 * 4 + 2 * 3 * 64 * 96
    scores = 2 * tokens * 32 * 64  # of the two products of attention; its backward has five, or four if it is not fused
    products = 3 * tokens * (2 * (projections + experts) + 64 * 100) + 2 * scores * halves // 2
    assert made.simulated.flow.flops == 2 * products
