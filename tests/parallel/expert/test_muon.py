"""Muon with experts that are spread over ranks: every matrix of a stack is orthogonalized as in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.ops.muon import Muon, set_optimizer_flags
from deepspeed.utils import safe_get_full_fp32_param
from tests.harness import on_first_rank, run_ranks
from tests.parallel.expert.models import batch, build
from tests.parallel.expert.test_auto import config, of_this_rank

STEPS = 3
PARAMS = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-6}


@on_first_rank
def _reference(kind: str, world: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build(kind)
    set_optimizer_flags({"optimizer": {"type": "Muon"}}, model)
    optimizer = Muon(model.parameters(), **PARAMS)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum(model(**batch(step, other)).loss for other in range(world)) / world
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def _check(cells: list[tuple[str, int, int, dict[str, Any]]]) -> list[int]:
    world, sent = dist.get_world_size(), []
    for kind, stage, ep_size, zero in cells:
        losses, whole = _reference(kind, world)
        settings = config(stage, ep_size, optimizer={"type": "Muon", "params": PARAMS})
        settings["zero_optimization"].update(zero)
        model = build(kind)
        engine, *_ = deepspeed.initialize(model=model, config=settings)
        for step in range(STEPS):
            loss = engine(**batch(step, dist.get_rank())).loss
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            assert mean.item() / world == pytest.approx(losses[step], rel=1e-4), (kind, stage, step)
        for name, parameter in engine.module.named_parameters():
            value = safe_get_full_fp32_param(parameter)
            expected = of_this_rank(parameter, whole[name], ep_size)
            torch.testing.assert_close(value, expected, rtol=2e-3, atol=3e-4, msg=f"{kind}, {stage}, {ep_size}: {name}")
        sent.append(engine.basic_optimizer.sent_bytes)
        engine.destroy()
    return sent


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CELLS = {
    2: [("mixtral", 1, 2, {}), ("qwen3_moe", 3, 2, OFFLOAD)],
    4: [("mixtral", 2, 2, {}), ("qwen3_moe", 3, 2, {}), ("deepseek_v3", 1, 4, OFFLOAD), ("gpt_oss", 2, 2, {})],
}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_spread_experts_equal_one_process(world):
    for sent in run_ranks(_check, world, CELLS[world]):
        assert all(sent)
