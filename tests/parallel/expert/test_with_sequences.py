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
from tests.harness import on_ranks
from tests.harness.training import plain_run, train_like
from tests.parallel.expert.models import VOCABULARY, build
from tests.parallel.expert.test_auto import ADAMW, adamw, config

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


def _whole_loss(model: Any, step: int, data: int) -> torch.Tensor:
    each, labels = _losses_of(model, _batch(step, data))
    return each.sum() / (labels != -100).sum()


def _check(stage: int, sequence: int, ep_size: int, far: bool) -> None:
    copies = dist.get_world_size() // sequence
    optimizer = lambda given: torch.optim.AdamW(given, **ADAMW)  # noqa: E731
    expected = plain_run(_model(), STEPS, copies, loss=_whole_loss, optimizer=optimizer)
    model = _model()
    settings = config(stage, ep_size, sequence_parallel_size=sequence, use_data_before_expert_parallelism=far)
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)[0]
    place, width = rank() % sequence, TOKENS // sequence

    def part_loss(model: Any, step: int, data: int) -> torch.Tensor:
        batch = {key: value[:, place * width : (place + 1) * width] for key, value in _batch(step, data).items()}
        return mean_loss(*_losses_of(model, batch))

    train_like(engine, expected, part_loss, rank() // sequence)
    sharing = groups._get_expert_parallel_group_ranks(f"ep_size_{ep_size}")
    assert len(sharing) == ep_size
    mine = sharing.index(rank())
    for name, parameter in model.named_parameters():
        wanted = expected.state[name]
        if not getattr(parameter, "allreduce", True):
            wanted = wanted.chunk(ep_size)[mine]
        torch.testing.assert_close(
            safe_get_full_fp32_param(parameter), wanted, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    engine.destroy()


@pytest.mark.parametrize(
    ("ranks", "cells"),
    [
        pytest.param(
            2, [(stage, 2, 2, False) for stage in (0, 1, 2, 3)], id="two ranks share a sequence and the experts"
        ),
        pytest.param(4, [(1, 2, 4, False), (3, 2, 2, True)], id="four ranks"),
        pytest.param(4, [(3, 2, 4, False), (2, 2, 2, False)], id="four ranks at other stages", marks=pytest.mark.slow),
    ],
)
@on_ranks(timeout=200)
def test_experts_over_data_and_sequence_ranks(cells: list[tuple[int, int, int, bool]]) -> None:
    for cell in cells:
        _check(*cell)
