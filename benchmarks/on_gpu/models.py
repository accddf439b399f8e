"""The models of the GPU benchmark: the GPT of the other benchmarks at published sizes, and who trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from contest.workloads import GPT
from torch import nn

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A GPT.

    Attributes:
        width: Of the hidden states.
        layers: Number of blocks.
        heads: Per block.
        length: Tokens of a sequence.
        vocabulary: Number of words.
        micro_batch: Sequences per step and rank.
    """

    width: int
    layers: int
    heads: int
    length: int
    vocabulary: int
    micro_batch: int

    def build(self, device: str, dtype: torch.dtype = torch.float32) -> GPT:
        """Makes the model on ``device``."""
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
        """Tokens per step and rank."""
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
    zero: dict[str, Any] = {"stage": int(stage)}
    if stage == "3":
        zero["stage3_param_persistence_threshold"] = 0
    if host:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return zero


def config_of(shape: Shape, zero: dict[str, Any], clip: float = 1.0) -> dict[str, Any]:
    """Returns the configuration: bf16, AdamW, and the section ``zero_optimization`` as given."""
    return {
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "bf16": {"enabled": True},
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
    }


def engine_step(model: nn.Module, shape: Shape, zero: dict[str, Any], clip: float = 1.0) -> tuple[Step, Any]:
    """Initializes ``deepspeed`` (this project's or the published one); returns a training step, and the engine."""
    import deepspeed

    config = config_of(shape, zero, clip)
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]

    def step(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, engine


def torch_step(model: nn.Module, *, autocast: bool, clip: float = 1.0) -> Step:
    """Returns the step of plain torch, DDP or FSDP2: fused AdamW over whatever parameters the model has."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    device = next(model.parameters()).device.type

    def step(batch: Batch) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fully_sharded(model: GPT, device: str, ranks: int) -> GPT:
    """Returns the model under FSDP2: a unit per block, fp32 shards, bf16 computation and reduction."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
