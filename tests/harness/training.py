"""Training in plain torch on one rank, and the same training by an engine."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.harness.compare import on_first_rank

LossOf = Callable[[Any, int, int], torch.Tensor]
"""The loss of a model, or an engine, on a micro-batch: its number, 10 times the step and more, and who sees it."""


@dataclass
class Expected:
    """What one rank computes with a whole model.

    Attributes:
        losses: Mean over the ranks that see different samples, by step.
        norms: Of the gradients, before clipping.
        state: The model afterwards.
    """

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]


@on_first_rank
def plain_run(
    model: nn.Module,
    steps: int,
    data: int,
    accumulation: int = 1,
    clip: float = 0.5,
    *,
    loss: LossOf,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> Expected:
    """Trains a copy of ``model`` with plain torch, on rank 0 for all; ``data`` ranks see different samples."""
    model = copy.deepcopy(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    updates = optimizer(trained)
    found = Expected([], [], {})
    for step in range(steps):
        updates.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            for rank in range(data):
                part = loss(model, 10 * step + micro, rank) / data / accumulation
                part.backward()
                total += part.item()
        found.norms.append(torch.nn.utils.clip_grad_norm_(trained, clip).item())
        updates.step()
        found.losses.append(total)
    found.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return found


def train_like(
    engine: Any,
    expected: Expected,
    loss: LossOf,
    data: int,
    accumulation: int = 1,
    *,
    rel: float = 1e-5,
    norm_rel: float | None = None,
    what: Any = "",
) -> None:
    """Trains an engine on all ranks: the losses and norms of each step are the expected ones.

    Args:
        engine: Its ranks see equally many samples.
        expected: By :func:`plain_run`.
        loss: Its loss on a micro-batch.
        data: Which of those who see different samples this rank is.
        accumulation: Micro-batches per step.
        rel: How far off a loss may be, as a part of it.
        norm_rel: The same of a norm; None: ``rel``.
        what: What a failure names.
    """
    for step, (wanted, norm) in enumerate(zip(expected.losses, expected.norms, strict=True)):
        mean = torch.zeros(())
        for micro in range(accumulation):
            part = loss(engine, 10 * step + micro, data)
            engine.backward(part)
            engine.step()
            mean += part.detach().float().cpu() / accumulation
        dist.all_reduce(mean)
        found = [mean.item() / dist.get_world_size(), engine.get_global_grad_norm()]
        assert abs(found[0] - wanted) <= rel * abs(wanted), f"{what} step {step}: loss {found[0]}, expected {wanted}"
        assert abs(found[1] - norm) <= (norm_rel or rel) * norm, f"{what} step {step}: norm {found[1]}, expected {norm}"
