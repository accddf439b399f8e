"""``load_balance_coeff`` against plain torch: biases move by the loads of all ranks and micro-batches, and choose."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.expert.balance import _BiasedChoice, prepare_biases
from deepspeed.parallel.expert.spread import Spread, is_stack, spread
from tests.engine.support import rank
from tests.harness import on_first_rank, on_ranks
from tests.parallel.expert.models import batch, build
from tests.parallel.expert.test_auto import adamw, config

STEPS, MICRO_BATCHES, COEFFICIENT = 3, 2, 0.125


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "gate") and hasattr(module, "experts")]


def _bias(block: Any) -> torch.Tensor:
    return getattr(block.gate, "e_score_correction_bias", getattr(block.gate, "expert_bias", None))


def _choose(gate: Any, x: torch.Tensor) -> Any:
    """Mixtral's router, written again with a bias."""
    logits = F.linear(x.view(-1, gate.hidden_dim), gate.weight)
    scores = logits.float().softmax(-1)
    index = (scores + gate.expert_bias).topk(gate.top_k).indices
    weights = scores.gather(-1, index)
    return logits, weights / weights.sum(-1, keepdim=True), index


def _count(load: torch.Tensor, index: torch.Tensor) -> None:
    load += torch.bincount(index.flatten(), minlength=4)


@on_first_rank
def _reference(kind: str, world: int) -> tuple[list[list[float]], list[torch.Tensor]]:
    model = build(kind)
    blocks = _blocks(model)
    loads = [torch.zeros(4) for _ in blocks]
    for block, load in zip(blocks, loads, strict=True):
        if _bias(block) is None:
            block.gate.expert_bias = torch.zeros(4)
            block.gate.forward = lambda x, gate=block.gate: _choose(gate, x)
        block.experts.register_forward_pre_hook(lambda _, inputs, load=load: _count(load, inputs[1]))
    optimizer, found = adamw(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [
            [model(**batch(step * MICRO_BATCHES + micro, other)).loss for other in range(world)]
            for micro in range(MICRO_BATCHES)
        ]
        (sum(map(sum, losses)) / world / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        for block, load in zip(blocks, loads, strict=True):
            _bias(block).add_(COEFFICIENT * (load.mean() - load).sign())
            load.zero_()
        found += [[loss.item() for loss in row] for row in losses]
    return found, [_bias(block).clone() for block in blocks]


@on_ranks(2)
@pytest.mark.parametrize(("kind", "stage"), [("mixtral", 3), ("deepseek_v3", 1)])
def test_biases_follow_the_loads(kind: str, stage: int, tmp_path: Path) -> None:
    losses, biases = _reference(kind, 2)
    settings = config(stage, gradient_accumulation_steps=MICRO_BATCHES)
    settings["expert_parallel"]["load_balance_coeff"] = COEFFICIENT

    def engine_of() -> Any:
        model = build(kind)
        model.gradient_checkpointing_enable()  # every forward runs twice
        return deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)[0]

    engine = engine_of()
    engine.train()
    for number, row in enumerate(losses):
        with torch.no_grad():  # not counted
            engine(**batch(1000, rank()))
        loss = engine(**batch(number, rank())).loss
        assert loss.item() == pytest.approx(row[rank()], abs=1e-5), f"micro-batch {number}"
        engine.backward(loss)
        engine.step()
    assert any(bias.any() for bias in biases)
    _check(engine, biases)
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    again = engine_of()
    again.load_checkpoint(str(tmp_path))
    _check(again, biases)
    again.destroy()


def _check(engine: Any, biases: list[torch.Tensor]) -> None:
    blocks = _blocks(engine.module)
    for block, wanted in zip(blocks, biases, strict=True):
        torch.testing.assert_close(_bias(block), wanted, rtol=0, atol=0)


def test_experts_outside_of_chosen_groups_stay_behind() -> None:
    scores, bias = torch.tensor([[0.5, 0.3, 0.0, 0.0]], requires_grad=True), torch.tensor([0.0, 0.0, 9.0, 9.0])
    with _BiasedChoice(bias):
        assert scores.topk(1).indices.item() == 2
    with _BiasedChoice(bias):
        torch.topk(scores.view(1, 2, 2).amax(-1), 1)
        values, indices = torch.topk(scores, k=2, dim=-1, sorted=False)
    assert sorted(indices.flatten().tolist()) == [0, 1]
    values.sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[1, 1, 0, 0]]


def test_routers_that_choose_otherwise_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_local_experts": 4, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 50}
    model = transformers.PhimoeModel(transformers.PhimoeConfig(**sizes, **heads))
    for module in model.modules():
        if is_stack(module):
            spread(module, Spread.of(module, 1))
    prepare_biases(model, torch.device("cpu"))
    with pytest.raises(DeepSpeedConfigError, match=r"expected the router PhimoeTopKRouter to choose among 4 experts"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
