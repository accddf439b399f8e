"""A small model with awkward sizes, and engines on it."""

import copy
from typing import Any

import torch
from torch import nn

import deepspeed
from tests.harness.toy_models import Layer


def new_block(width: int) -> Layer:
    return Layer(width, 2 * width + 1, has_norm=True, activation=torch.relu)


class Model(nn.Module):
    """Blocks, a scalar, an empty parameter, a frozen one, and one that the loss never uses."""

    def __init__(self, width: int = 7, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(
            Layer(width, 2 * width + 1, has_norm=True, activation=torch.relu) for _ in range(depth)
        )
        self.last = nn.Linear(width, 3)
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.linspace(-1, 1, width), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.frozen
        for block in self.blocks:
            x = block(x)
        return (self.last(x) * self.factor).square().mean()


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    made = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "gradient_clipping": 0.0,
    }
    return {**made, **more}


def build(stage: int, model: nn.Module | None = None, seed: int = 3, **more: Any) -> Any:
    """An engine on ``model`` (by default the awkward one), the same on all ranks."""
    torch.manual_seed(seed)
    return deepspeed.initialize(model=Model() if model is None else model, config=config(stage, **more))[0]


def batch(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, 5, generator=generator).to(dtype)


def train(engine: Any, rank: int, steps: int, first: int = 0) -> None:
    dtype = next(p for p in engine.module.parameters() if p.is_floating_point()).dtype
    for step in range(first, first + steps):
        engine.backward(engine(batch(rank, step, dtype)))
        engine.step()


def reference(ranks: int, steps: int, model: nn.Module | None = None, seed: int = 3) -> tuple[nn.Module, Any]:
    """Plain torch over everybody's batches: the model and its optimizer after ``steps``."""
    torch.manual_seed(seed)
    model = Model() if model is None else copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        reference_backward(model, ranks, step)
        optimizer.step()
    return model, optimizer


def reference_backward(model: nn.Module, ranks: int, step: int) -> None:
    for rank in range(ranks):
        (model(batch(rank, step)) / ranks).backward()
