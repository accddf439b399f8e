"""Experts over ranks that share a sequence: groups of data x sequence ranks equal one process that has everything."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.job import groups
from deepspeed.sequence import mean_loss
from deepspeed.utils import safe_get_full_fp32_param
from tests.engine.support import rank
from tests.harness import on_first_rank, run_ranks
from tests.parallel.expert.models import VOCABULARY, build
from tests.parallel.expert.test_auto import adamw, config

TOKENS, STEPS = 8, 3


def _model() -> Any:
    model = build("qwen3_moe", output_router_logits=False)
    model.set_attn_implementation("sdpa")
    return model


def _batch(step: int, data: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(31 * step + data)
    ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)
    labels = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), 1)
    labels[0, : 3 + data] = -100  # so that the parts of a sequence have different numbers of labels
    return {"input_ids": ids, "position_ids": torch.arange(TOKENS).expand(2, -1).contiguous(), "shift_labels": labels}


def _losses_of(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["shift_labels"]
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return each, labels


@on_first_rank
def _reference(copies: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and norms of each step, and the trained parameters, in one process."""
    model = _model()
    optimizer = adamw(model)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for data in range(copies):
            each, labels = _losses_of(model, _batch(step, data))
            loss = each.sum() / (labels != -100).sum() / copies
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(total)
    return losses, norms, {name: value.detach() for name, value in model.named_parameters()}


def _check(stage: int, sequence: int, ep_size: int, far: bool) -> None:
    copies = dist.get_world_size() // sequence
    losses, norms, trained = _reference(copies)
    model = _model()
    settings = config(stage, ep_size, sequence_parallel_size=sequence, use_data_before_expert_parallelism=far)
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)[0]
    data, place, width = rank() // sequence, rank() % sequence, TOKENS // sequence
    for step in range(STEPS):
        batch = {key: value[:, place * width : (place + 1) * width] for key, value in _batch(step, data).items()}
        each, labels = _losses_of(engine, batch)
        loss = mean_loss(each, labels)
        engine.backward(loss)
        engine.step()
        result = loss.detach().clone()
        dist.all_reduce(result)
        assert result.item() / dist.get_world_size() == pytest.approx(losses[step], rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(norms[step], rel=1e-5)
    sharing = groups._get_expert_parallel_group_ranks(f"ep_size_{ep_size}")
    assert len(sharing) == ep_size
    mine = sharing.index(rank())
    for name, parameter in model.named_parameters():
        wanted = trained[name]
        if not getattr(parameter, "allreduce", True):
            wanted = wanted.chunk(ep_size)[mine]
        torch.testing.assert_close(
            safe_get_full_fp32_param(parameter), wanted, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    engine.destroy()


def _cells(cells: list[tuple[int, int, int, bool]]) -> None:
    for cell in cells:
        _check(*cell)


def test_two_ranks_share_a_sequence_and_the_experts():
    run_ranks(_cells, 2, [(stage, 2, 2, False) for stage in (0, 1, 2, 3)])


@pytest.mark.parametrize(
    "cells",
    [
        [(1, 2, 4, False), (3, 2, 2, True)],
        pytest.param([(3, 2, 4, False), (2, 2, 2, False)], marks=pytest.mark.slow),
    ],
)
def test_experts_over_data_and_sequence_ranks(cells):
    run_ranks(_cells, 4, cells, timeout=200)
