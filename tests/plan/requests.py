"""The small model, the configuration and the call that tests of plans share."""

import torch
from torch import nn

import deepspeed
from deepspeed.plan import DecoderShape

SHAPE = DecoderShape(layers=2, hidden=64, heads=4, vocab=128)
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 1},
}
SIZES = ["--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "128", "--sequence-length", "32"]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x, target):
        hidden = torch.relu(self.one(x.to(self.one.bias.dtype)))
        return {"loss": (self.two(hidden) - target).square().mean()}


def pair_with_inputs():
    return Pair(), lambda samples, _tokens: (torch.zeros(samples, 8), torch.zeros(samples, 1))


def plan(model=SHAPE, config=CONFIG, **options):
    return deepspeed.plan(model, config, **{"sequence_length": 32, "compare_checkpointing": False, **options})
