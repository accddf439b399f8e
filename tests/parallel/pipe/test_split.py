"""The two halves of a backward are the whole, and the first one computes nothing for weights."""

import gc

import pytest
import torch
from torch import nn

from deepspeed.parallel.pipe.split import backward_to_inputs


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 11), nn.Linear(11, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(6))
        self.offset = nn.Parameter(torch.randn(6))

    def forward(self, x):
        # `offset` comes to the input by a node of its own, and there is a part that no input leads to
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale + torch.sigmoid(self.offset)


def _run(model, x, split):
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    out = model(leaf)
    gradient = torch.linspace(-1, 1, out.numel()).view_as(out)
    if not split:
        out.backward(gradient)
        return leaf.grad, [p.grad for p in model.parameters()], None
    work = backward_to_inputs([out], [gradient], [leaf])
    between = [p.grad for p in model.parameters()]
    if work is not None:
        work.run()
    return leaf.grad, [p.grad for p in model.parameters()], between


def test_halves_are_the_whole():
    torch.manual_seed(0)
    model, x = nn.Sequential(Residual(), Residual()), torch.randn(4, 6)
    expected, weights, _ = _run(model, x, split=False)
    weights = [w.clone() for w in weights]
    found, halves, between = _run(model, x, split=True)
    assert all(grad is None for grad in between)
    assert torch.equal(found, expected)
    for mine, theirs in zip(halves, weights, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_weight_with_two_uses_is_not_split():
    torch.manual_seed(0)
    layer, x = Residual(), torch.randn(4, 6)
    model = nn.Sequential(layer, layer)
    expected, weights, _ = _run(model, x, split=False)
    weights = [w.clone() for w in weights]
    found, whole, between = _run(model, x, split=True)
    assert all(grad is not None for grad in between) and torch.equal(found, expected)
    for mine, theirs in zip(whole, weights, strict=True):
        assert torch.equal(mine, theirs)


def test_each_product_is_computed_once():
    """Half the products of a linear layer's backward belong to each half."""
    from torch.utils.flop_counter import FlopCounterMode

    model, x = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), torch.randn(4, 8)
    leaf = x.requires_grad_()
    out = model(leaf)
    with FlopCounterMode(display=False) as first:
        work = backward_to_inputs([out], [torch.ones_like(out)], [leaf])
    with FlopCounterMode(display=False) as second:
        work.run()
    assert first.get_total_flops() == second.get_total_flops() == 2 * 2 * 4 * 8 * 8


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


@pytest.mark.parametrize("ends_with", ["a function", "an operation"])
def test_nodes_of_functions_outlive_the_outputs(ends_with):
    weights = [nn.Parameter(torch.tensor([2.0, 3.0])) for _ in range(3)]
    leaf = torch.ones(2, requires_grad=True)
    out = _Product.apply(_Product.apply(_Product.apply(leaf, weights[0]), weights[1]) + 1, weights[2])
    if ends_with == "an operation":
        out = out * 1
    work = backward_to_inputs([out], [torch.ones(2)], [leaf])
    del out
    gc.collect()
    work.run()
    assert leaf.grad.tolist() == [8.0, 27.0]
    assert [weight.grad.tolist() for weight in weights] == [[4.0, 9.0], [4.0, 9.0], [5.0, 10.0]]


@pytest.mark.parametrize("inputs", [1, 2])
def test_outputs_beside_the_way(inputs):
    """An output that only weights lead to waits for the second half."""
    weight = nn.Parameter(torch.ones(3))
    leaves = [torch.randn(3, requires_grad=True) for _ in range(inputs)]
    outs = [leaves[-1] * 2, weight * 3]
    work = backward_to_inputs(outs, [torch.ones(3), torch.ones(3)], leaves)
    assert weight.grad is None and torch.equal(leaves[-1].grad, torch.full((3,), 2.0))
    work.run()
    assert torch.equal(weight.grad, torch.full((3,), 3.0))


@pytest.mark.parametrize("hooked", ["activation", "output"])
def test_hooks_on_tensors_change_gradients_once(hooked):
    torch.manual_seed(0)
    x, weights = torch.randn(5, 3), [torch.randn(3, 4), torch.randn(4, 2)]

    def run(split):
        leaf, first, second = (value.clone().requires_grad_() for value in (x, *weights))
        activation = leaf @ first
        out = torch.tanh(activation) @ second
        {"activation": activation, "output": out}[hooked].register_hook(lambda gradient: gradient * 2)
        if split:
            work = backward_to_inputs([out], [torch.ones_like(out)], [leaf])
            assert work is not None
            work.run()
        else:
            out.sum().backward()
        return leaf.grad, first.grad, second.grad

    for mine, theirs in zip(run(split=True), run(split=False), strict=True):
        torch.testing.assert_close(mine, theirs)
