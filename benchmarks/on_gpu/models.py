"""The GPT of the other benchmarks at published sizes, and its training steps in several libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from contest.contestants import ADAMW, engine_config, zero_section
from contest.workloads import GPT
from torch import nn

CLIP = 1.0
Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT and its batch.

    Attributes:
        width: Width of the hidden states.
        layers: Number of blocks.
        heads: Heads of a block.
        length: Tokens of a sequence.
        vocabulary: Number of tokens in the vocabulary.
        micro_batch: Sequences per step and rank.
    """

    width: int
    layers: int
    heads: int
    length: int
    vocabulary: int
    micro_batch: int

    def build(self, device: str, dtype: torch.dtype = torch.float32) -> GPT:
        """Returns the model on ``device``."""
        with torch.device(device):
            model = GPT(
                width=self.width,
                layers=self.layers,
                heads=self.heads,
                length=self.length,
                vocabulary=self.vocabulary,
            )
        return model.to(dtype)

    def batch(self, device: str) -> Batch:
        """Returns inputs and targets, int64 ``[micro_batch, length]`` each."""
        tokens = torch.randint(0, self.vocabulary, (self.micro_batch, self.length + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @property
    def tokens(self) -> int:
        """Returns the tokens per step and rank."""
        return self.micro_batch * self.length


SHAPES = {
    "tiny": Shape(width=32, layers=2, heads=2, length=16, vocabulary=64, micro_batch=2),
    "350M": Shape(width=1024, layers=24, heads=16, length=1024, vocabulary=50304, micro_batch=8),
    "1.3B": Shape(width=2048, layers=24, heads=16, length=1024, vocabulary=50304, micro_batch=8),
    "3B": Shape(width=2560, layers=36, heads=20, length=1024, vocabulary=50304, micro_batch=4),
    "8B": Shape(width=4096, layers=36, heads=32, length=2048, vocabulary=50304, micro_batch=1),
}


def zero_of(who: str) -> dict[str, Any]:
    """Returns the section ``zero_optimization`` for ``NAME-STAGE[-host]``; ``host``: the optimizer is offloaded."""
    _, stage, *host = who.split("-")
    zero = zero_section(int(stage), *host)
    if host:
        zero["offload_optimizer"]["pin_memory"] = True
    return zero


def engine_step(model: nn.Module, shape: Shape, zero: dict[str, Any]) -> tuple[Step, Any]:
    """Initializes ``deepspeed`` (this project's or the published one); returns a training step and the engine."""
    import deepspeed

    config = engine_config(zero, shape.micro_batch, CLIP)
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]

    def step(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, engine


def torch_step(model: nn.Module, *, autocast: bool) -> Step:
    """Returns the training step of a model of torch, DDP or FSDP2, with fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    device = next(model.parameters()).device.type

    def step(batch: Batch) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
