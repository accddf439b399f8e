"""A state dict of a model whose layers or experts ranks share is this rank's part, and this is logged."""

import torch
from torch import nn

import deepspeed
from deepspeed import logging
from deepspeed.moe.layer import MoE
from tests.harness import run_ranks

SPECS = [
    {"patterns": ["up"], "partition_type": "column"},
    {"patterns": ["down"], "partition_type": "row"},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def _warns(model: nn.Module, **sections: object) -> bool:
    """Whether ``state_dict()`` warns."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **sections}
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert "parts:state_dict()" not in logging._seen
    engine.module.state_dict()
    engine.destroy()
    found = "parts:state_dict()" in logging._seen
    logging._seen.discard("parts:state_dict()")
    return found


def _layers() -> None:
    assert _warns(Block(), tensor_parallel={"autotp_size": 2, "partition_config": {"layer_specs": SPECS}})


def _experts() -> None:
    assert _warns(nn.Sequential(MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2)))
    # These are whole on every rank.
    assert not _warns(Block())
    assert not _warns(nn.Sequential(MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=1)))


def test_a_state_dict_of_parts_is_logged():
    run_ranks(_layers, 2)
    run_ranks(_experts, 2)
