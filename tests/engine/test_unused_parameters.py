"""``ignore_unused_parameters: false``: decided at the update, on all ranks alike, for what is trained now."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.errors import CallOrderError
from tests.engine.support import WIDTH, engine_of, inputs
from tests.harness import on_ranks


class Branches(nn.Module):
    """Two linears, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        y = self.always(x)
        return (y + self.sometimes(x) if both else y).square().mean()


def strict(stage: int) -> None:
    zero = {"ignore_unused_parameters": False, "stage3_param_persistence_threshold": 0}
    rank = dist.get_rank()
    engine = engine_of(Branches(), stage, zero=zero, accumulation=2)
    for micro in range(2):  # the update has everything, the first micro-batch has not
        engine.backward(engine(inputs(micro, rank), micro == 1))
        engine.step()
    for micro in range(2):  # one rank has everything
        engine.backward(engine(inputs(micro, rank), rank == 0 or stage == 3))
        engine.step()
    before = engine.module.always.weight.sum().item() if stage < 3 else 0.0
    for _ in range(2):
        engine.backward(engine(inputs(5, rank), False))
        if engine.is_gradient_accumulation_boundary():
            with pytest.raises(CallOrderError, match="on any rank: sometimes.weight, sometimes.bias"):
                engine.step()
        else:
            engine.step()
    assert stage == 3 or engine.module.always.weight.sum().item() == before
    for parameter in engine.module.sometimes.parameters():
        parameter.requires_grad_(False)  # as the message advises
    engine.backward(engine(inputs(6, rank), False))
    engine.step()
    assert engine.global_steps == 3
    engine.destroy()


@on_ranks(2)
def test_unused_parameters_are_refused_alike_on_all_ranks() -> None:
    stages = (1, 2, 3)
    for stage in stages:
        strict(stage)
