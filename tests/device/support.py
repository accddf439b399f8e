"""The short way to an engine on the simulated device."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepspeed
from tests.engine.support import inputs
from tests.harness.toy_models import tower

TIERS: dict[str, dict[str, str]] = {
    "device": {},
    "optimizer on the host": {"offload_optimizer": "cpu"},
    "both on the host": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "optimizer in files": {"offload_optimizer": "nvme"},
    "both in files": {"offload_optimizer": "nvme", "offload_param": "nvme"},
}


def engine_at(
    stage: int,
    tier: str = "device",
    folder: Path | None = None,
    *,
    model: nn.Module | None = None,
    precision: str = "bf16",
    accumulation: int = 1,
    zero: dict[str, Any] | None = None,
    **sections: Any,
) -> Any:
    """An engine over a small tower: four buckets or more, reductions during backward, pinned memory.

    Args:
        stage: ZeRO stage.
        tier: Of ``TIERS``.
        folder: For files.
        model: Another model.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        accumulation: Micro-batches per step.
        zero: Further keys of ``zero_optimization``.
        **sections: Further sections.
    """
    section: dict[str, Any] = {"stage": stage, "overlap_comm": True, "sub_group_size": 4096, "reduce_bucket_size": 300}
    if stage == 3:
        section["stage3_param_persistence_threshold"] = 0
    for key, device in TIERS[tier].items():
        section[key] = {"device": device}
        if device == "nvme":
            section[key]["nvme_path"] = str(folder)
            if key == "offload_param":  # few buffers, so that they are used again and again
                section[key] |= {"max_in_cpu": 0, "buffer_count": 2}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {**section, **(zero or {})},
        **sections,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return deepspeed.initialize(model=model if model is not None else tower(depth=2), config=config)[0]


def batch(engine: Any, *position: int) -> torch.Tensor:
    return inputs(*position).to(engine.device)


def step(engine: Any, number: int = 0) -> None:
    """One update."""
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(batch(engine, number, micro)))
        engine.step()


def evaluate(engine: Any) -> None:
    engine.eval()
    with torch.no_grad():
        engine(batch(engine, 99))
    engine.train()
