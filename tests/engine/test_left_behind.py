"""What an engine must not leave behind, and what a user may not do to a parameter in a flat buffer."""

import gc

import pytest
import torch
from torch import nn

from deepspeed.errors import CallOrderError
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_grad
from tests.engine.support import WIDTH, engine_of, inputs
from tests.harness import on_ranks
from tests.harness.toy_models import tower


class Returning(nn.Module):
    """Returns one of its parameters beside the loss, as models with a learnt temperature do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x).square().mean(), self.scale


@on_ranks(1)
def test_an_engine_leaves_nothing_behind() -> None:
    for _ in range(2):
        engine = engine_of(tower(), 1, disable_python_gc=True)
        assert not gc.isenabled()
        engine.destroy()
        engine.destroy()
        assert gc.isenabled()
    engine = engine_of(tower(), 1)
    closed = []
    engine._runtime.drop_open_work = lambda **_: closed.append("work") or 1 / 0
    engine._parts.tiers.close = lambda: closed.append("tiers")
    with pytest.raises(ZeroDivisionError):
        engine.destroy()
    assert closed == ["work", "tiers"]
    engine = engine_of(Returning(), 1)
    for step in range(3):
        loss, scale = engine(inputs(step))
        (loss * scale).backward()  # the user's own
        engine.step()
    assert engine.global_steps == 3
    assert not engine.module.scale._backward_hooks, "one for each forward"
    engine.destroy()
    engine = engine_of(tower(), 1)
    engine.module.last.bias.data = torch.ones(1)
    engine.backward(engine(inputs(0)))
    with pytest.raises(CallOrderError, match=r"'last.bias' was given the shape \(1,\)"):
        engine.step()
    engine.destroy()
    engine = engine_of(tower(), 1)
    for step, dtype in enumerate((torch.float64, torch.float32)):  # a gradient of the present dtype is shown
        engine.module.to(dtype)
        engine.backward(engine(inputs(step).to(dtype)))
        assert engine.module.last.bias.grad.dtype == dtype
        engine.step()
    engine.destroy()


class Halves(nn.Module):
    """The second half gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).square().mean()


@on_ranks(2)
def test_a_gradient_set_by_the_user_counts_also_where_backward_gave_none() -> None:
    for stage in (0, 1, 3):
        engine = engine_of(Halves(), stage, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0))
        engine.backward(engine(inputs(0)))
        weight, bias = engine.module.unused.weight, engine.module.unused.bias
        before = [safe_get_full_fp32_param(parameter) for parameter in (weight, bias)]
        safe_set_full_grad(weight, torch.ones(WIDTH, WIDTH))
        engine.step()
        after = [safe_get_full_fp32_param(parameter) for parameter in (weight, bias)]
        assert torch.equal(after[0], before[0] - 1.0) and torch.equal(after[1], before[1])
        engine.destroy()
