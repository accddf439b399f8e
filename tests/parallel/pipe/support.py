"""A small model with everything awkward in it, as a pipeline and as one module, and runs of both."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

VOCABULARY, WIDTH = 11, 7


class Embed(nn.Module):
    """Tokens to vectors; ``scale`` is part of the tie too, though only the first use of it has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 3)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.embedding(tokens, self.weight) * self.scale, tokens > 2


def head(module: nn.Module, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    hidden, _ = value
    return hidden @ module.weight.T


class Block(nn.Module):
    """Takes and gives a tensor and a mask; odd widths."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, mask = value
        made = self.down(torch.tanh(self.up(self.norm(hidden))))
        return hidden + made * mask.unsqueeze(-1) + self.frozen, mask


def layers() -> list[Any]:
    return [
        TiedLayerSpec("embed", Embed),
        *[LayerSpec(Block, inner) for inner in (9, 13, 5, 9)],
        TiedLayerSpec("embed", Embed, forward_fn=head),
    ]


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def items(step: int, copy: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of a copy of the model; lengths differ from one to the next and from copy to copy."""
    made = torch.Generator().manual_seed(1000 * step + copy)
    lengths = [4 + (number + step + copy) % 3 for number in range(count)]
    return [tuple(torch.randint(VOCABULARY, (2, n), generator=made) for _ in range(2)) for n in lengths]


def config(stage: int, count: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
        **more,
    }


def engine_of(stages: int, stage: int, count: int, more: dict[str, Any] | None = None, **given: Any) -> Any:
    torch.manual_seed(3)
    module = PipelineModule(given.pop("layers", None) or layers(), num_stages=stages, loss_fn=loss_fn, **given)
    engine, *_ = deepspeed.initialize(model=module, config=config(stage, count, **(more or {})))
    return engine


def train(engine: Any, count: int, steps: int = 3, first: int = 0) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    losses = []
    for step in range(first, first + steps):
        loss = engine.train_batch(iter(items(step, engine.grid.data_parallel_id, count)))
        assert loss.shape == () and loss.dtype == torch.float32
        losses.append((loss.item(), engine.get_global_grad_norm()))
    return losses


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Masters of this rank's stage, by name."""
    return {name: value.clone() for name, value in engine.iter_full("fp32")}


def reference(copies: int, count: int, steps: int = 3) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """The same training in one process, in plain torch. Called where one rank is the whole job."""
    torch.manual_seed(3)
    module = PipelineModule(layers(), num_stages=1, loss_fn=loss_fn)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(steps):
        total = 0.0
        for copy in range(copies):
            for inputs, labels in items(step, copy, count):
                loss = loss_fn(module(inputs), labels)
                (loss / count / copies).backward()
                total += loss.item() / count / copies
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total, norm.item()))
    return losses, {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
