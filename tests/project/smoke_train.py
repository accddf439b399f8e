"""A training script as a user writes it: every stage in turn, each from the same start. Run by test_smoke.py.

Writes one JSON object per rank into the folder given: stage -> losses.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

import deepspeed


class Net(nn.Module):
    """Odd sizes, so that shards do not fit evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(17, 33), nn.Linear(33, 33), nn.Linear(33, 5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


def train(stage: int) -> list[float]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=Net(), config=config)
    torch.manual_seed(1 + engine.global_rank)
    x, y = torch.randn(4, 17, device=engine.device), torch.randn(4, 5, device=engine.device)
    losses = []
    for _ in range(5):
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--local_rank", type=int, default=0)
    folder = parser.parse_args().folder
    losses = {stage: train(stage) for stage in (0, 1, 2, 3)}
    (folder / f"rank{deepspeed.comm.get_rank()}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
