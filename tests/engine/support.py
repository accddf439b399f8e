"""The shortest way to an engine, for tests of one behavior."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepspeed.engine import DeepSpeedEngine, initialize
from tests.harness.toy_models import TOWER_WIDTH as WIDTH

# Everything sharded, at least four buckets on a tower, nothing kept between forward and backward.
SHARDED: dict[str, Any] = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
}


def inputs(*position: int, samples: int = 2) -> torch.Tensor:
    """The batch at ``position`` of this rank (pass the rank too where ranks are to differ)."""
    seed = 11
    for number in position:
        seed = seed * 1009 + number + 1
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """What most tests train with; eps is large enough that rounding does not decide a direction."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5, weight_decay=0.1)


def engine_of(
    model: nn.Module,
    stage: int,
    *,
    optimizer: Any = adamw,
    zero: dict[str, Any] | None = None,
    accumulation: int = 1,
    **config: Any,
) -> DeepSpeedEngine:
    """An engine around ``model``.

    Args:
        model: The model.
        stage: ZeRO stage; stage 3 gets :data:`SHARDED` unless ``zero`` has other keys.
        optimizer: Makes the client's optimizer from the model; None for none.
        zero: Further keys of ``zero_optimization``.
        accumulation: Micro-batches per step.
        **config: Further sections; clipping is off by default.
    """
    section = {"stage": stage, **(SHARDED if stage == 3 and zero is None else {}), **(zero or {})}
    full = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": section,
        **config,
    }
    client: Callable[[nn.Module], torch.optim.Optimizer] | None = optimizer
    return initialize(model=model, optimizer=client(model) if client else None, config=full)[0]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def same_on_all_ranks(value: Any) -> bool:
    """Whether all ranks hold an equal ``value`` (compared by ``repr``). All ranks must call."""
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, repr(value))
    return all(text == seen[0] for text in seen)
