"""``python -m on_gpu.one_step``: two training steps of a small model at stage 3 with the optimizer on the host."""

from __future__ import annotations

import sys

import torch
from torch import nn

import deepspeed


def main() -> None:
    """Trains two steps and prints their losses."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "stage3_param_persistence_threshold": 0,
        },
    }
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 33))
    engine = deepspeed.initialize(model=model, config=config)[0]
    for step in range(2):
        x = torch.randn(2, 33, device=engine.device, dtype=torch.bfloat16)
        loss = (engine(x) - x).float().square().mean()
        engine.backward(loss)
        engine.step()
        sys.stdout.write(f"step {step}: loss {loss.item():.4f}\n")


if __name__ == "__main__":
    main()
