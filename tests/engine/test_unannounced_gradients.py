"""A ``.grad`` that no hook announced counts: zero-bubble schedules compute weights' gradients by ``autograd.grad``."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.engine.support import SHARDED, WIDTH, engine_of, inputs
from tests.harness import run_ranks
from tests.zero.reading import full_masters


class _ByHand(torch.autograd.Function):
    """``x * weight`` whose backward hands the weight its gradient itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, owner: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner = owner
        return x * weight

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.owner.weight.grad = (outputs[0] * x).sum(0)
        return outputs[0] * weight, None, None


class Scale(nn.Module):
    """One weight; its gradient comes from autograd or by hand."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.by_hand = by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ByHand.apply(x, self.weight.detach(), self) if self.by_hand else x * self.weight


class Model(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.scale, self.last = nn.Linear(WIDTH, WIDTH), Scale(by_hand), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.scale(torch.tanh(self.first(x)))).square().mean()


def _trained(stage: int, how: str, accumulation: int) -> dict[str, torch.Tensor]:
    zero = SHARDED if stage == 3 else {}
    engine = engine_of(Model(how == "in backward"), stage, zero=zero, accumulation=accumulation)
    for step in range(3):
        for micro in range(accumulation):
            loss = engine(inputs(step, micro, dist.get_rank()))
            if how == "afterwards":
                params = list(engine.module.parameters())
                found = torch.autograd.grad(loss / accumulation, params)
                for parameter, gradient in zip(params, found, strict=True):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            else:
                engine.backward(loss)
            engine.step()
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    return full_masters(engine)


def _agree(cells: list[tuple[int, str, int]]) -> None:
    for stage, how, accumulation in cells:
        expected = _trained(stage, "announced", accumulation)
        found = _trained(stage, how, accumulation)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, msg=lambda text: f"{stage}, {how}, {name}: {text}")  # noqa: B023


CELLS = [
    (0, "in backward", 2),
    (2, "in backward", 2),
    (3, "in backward", 1),
    (1, "afterwards", 2),
    (2, "afterwards", 1),
]


def test_gradients_that_no_hook_announced_count() -> None:
    run_ranks(_agree, 2, CELLS)


def test_on_one_rank() -> None:
    run_ranks(_agree, 1, [(0, "in backward", 2), (2, "afterwards", 2)])
