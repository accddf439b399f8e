"""Parameters that are used in ways which sharding does not expect, against plain torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

from tests.engine.support import WIDTH, Layer, inputs
from tests.harness import run_ranks
from tests.shapes.support import compare


def _loss(model, step, of):
    return model(inputs(step, of))


class _Product(torch.autograd.Function):
    """``x @ w.T`` with a backward of its own, as fused kernels are called."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.mm(x, w.t())

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class _OfAnother(nn.Module):
    """Hands a parameter of another module to an autograd function, and asks for its shape before it is gathered."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.other = [other]  # no child

    def forward(self, x):
        weight, bias = self.other[0].weight, self.other[0].bias
        assert weight.shape == (WIDTH, WIDTH) and weight.numel() == WIDTH * WIDTH and len(bias) == WIDTH
        return _Product.apply(self.own(x), weight) + bias.shape[0] * 0.01


class Borrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.lender = nn.Linear(WIDTH, WIDTH)
        self.borrower = _OfAnother(self.lender)
        self.last = Layer()

    def forward(self, x):
        return self.last(self.borrower(self.lender(self.first(x)))).square().mean()


def _shapes_seen_by_a_hook(module, args):
    rows, columns = module.weight.shape
    assert rows * columns == module.weight.numel() == WIDTH * WIDTH, tuple(module.weight.shape)
    return (args[0] * (columns / rows),)


class Hooked(nn.Module):
    """Hooks of the user's that read parameters before the forward of their module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = old_weight_norm(nn.Linear(WIDTH, WIDTH))
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.middle.register_forward_pre_hook(_shapes_seen_by_a_hook)
        self.last = Layer()

    def forward(self, x):
        return self.last(self.middle(self.first(x))).square().mean()


class Parametrized(nn.Module):
    """Weights that are computed whenever they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.middle = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.last = Layer()

    def forward(self, x):
        return self.last(self.middle(self.first(x))).square().mean()


def _used():
    for make in (Borrowing, Hooked, Parametrized):
        compare(make, _loss)


def test_borrowed_hooked_and_parametrized_weights():
    run_ranks(_used, 2, timeout=100)
