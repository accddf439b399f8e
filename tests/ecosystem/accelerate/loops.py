"""A model, its data, an Accelerate loop over them, and the same training in plain torch."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LR, ACCUMULATION, CLIP, MICRO, WIDTH = 0.02, 2, 0.25, 3, 16


class Net(nn.Module):
    """Small, with sizes that two ranks cannot halve evenly, and a ``config`` as models of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.config = SimpleNamespace(hidden_size=WIDTH)
        self.body = nn.Sequential(nn.Linear(7, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH + 1), nn.Tanh())
        self.head = nn.Linear(WIDTH + 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def shard_everything(plugin: Any) -> Any:
    """Small as the models are, stage 3 would leave them whole; this takes that threshold away."""
    plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return plugin


def data(rows: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 7, generator=generator)
    return TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


def loader(rows: int = 48, batch_size: int = MICRO) -> DataLoader:
    return DataLoader(data(rows), batch_size=batch_size)


def halving(step: int) -> float:
    """A schedule whose every step is seen."""
    return 0.5 ** (step / 8)


@dataclass
class Record:
    """What a training shows: local losses, norms before clipping and learning rates of the updates."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def accelerated(accelerator: Any, model: Any, optimizer: Any, batches: Any, scheduler: Any = None) -> Record:
    """One pass over ``batches``, written as Accelerate's documentation writes it."""
    record = Record()
    model.train()
    for x, y in batches:
        with accelerator.accumulate(model):
            rate = optimizer.param_groups[0]["lr"]
            loss = F.mse_loss(model(x.to(input_dtype(accelerator))).float(), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                record.norms.append(float(norm))
                record.rates.append(rate)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        record.losses.append(loss.item())
    return record


def input_dtype(accelerator: Any) -> torch.dtype:
    """Returns the dtype that a prepared model takes: the engine casts its weights, not what it is given."""
    return torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32


def plain(
    model: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    rank: int,
    ranks: int,
    rate_of_step: Callable[[int], float] | None = None,
    epochs: int = 1,
    rows: int = 48,
) -> tuple[nn.Module, Record]:
    """The same training in one process: micro-batches of all ranks, mean gradient, torch's clipping.

    Args:
        model: Is copied.
        make_optimizer: Builds the optimizer from the parameters.
        rank: Whose local losses are recorded.
        ranks: How many ranks share the batches, one after another as accelerate deals them out.
        rate_of_step: Learning rate of the n-th update.
        epochs: Passes over the data.
        rows: Rows of data.
    """
    model, record = copy.deepcopy(model), Record()
    optimizer = make_optimizer(model.parameters())
    batches = list(loader(rows))
    per_update = ACCUMULATION * ranks
    step = 0
    for _ in range(epochs):
        for first in range(0, len(batches), per_update):
            if rate_of_step is not None:
                for group in optimizer.param_groups:
                    group["lr"] = rate_of_step(step)
            window = batches[first : first + per_update]
            for number, (x, y) in enumerate(window):
                loss = F.mse_loss(model(x), y)
                (loss / len(window)).backward()
                if number % ranks == rank:
                    record.losses.append(loss.item())
            record.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            record.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return model, record


def assert_same(found: Record, expected: Record, tolerance: float = 1e-5) -> None:
    """Losses, norms and rates agree."""
    assert len(found.losses) == len(expected.losses) and len(found.norms) == len(expected.norms)
    assert all(math.isfinite(value) for value in found.losses + found.norms)
    for name in ("losses", "norms", "rates"):
        left, right = torch.tensor(getattr(found, name)), torch.tensor(getattr(expected, name))
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")
