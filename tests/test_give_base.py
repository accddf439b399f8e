"""Modules that get a further base class keep their names, parameters and hooks, and call what they did inside of it."""

from __future__ import annotations

import copy
import functools
import inspect
import types

import pytest
import torch
from torch import nn

from deepspeed.give_base import give_base, wrap_forward


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * super().forward(x)


class Negative(nn.Module):
    def forward(self, x):
        return -super().forward(x)


def test_names_parameters_and_hooks_stay():
    layer, x = nn.Linear(2, 3), torch.randn(4, 2)
    weight, expected, seen = layer.weight, layer(x), []
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    assert give_base(layer, Doubled) is layer and give_base(layer, Doubled) is layer
    assert torch.equal(layer(x), 2 * expected) and torch.equal(seen[0], 2 * expected)
    assert layer.weight is weight and isinstance(layer, nn.Linear) and repr(layer).startswith("Linear(")
    assert type(layer).__qualname__ == "Linear" and type(layer).__module__ == nn.Linear.__module__
    assert type(give_base(nn.Linear(2, 3), Doubled)) is type(layer)


def test_several_have_an_order_and_copies_have_them():
    layer, x = nn.Linear(2, 3), torch.randn(4, 2)
    expected = layer(x)
    give_base(give_base(layer, Doubled), Negative)
    assert torch.equal(layer(x), -2 * expected)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.fill_(1.0)
    assert torch.equal(other(x), torch.full((4, 3), -2.0)) and torch.equal(layer(x), -2 * expected)


def test_a_forward_of_the_object_is_called_inside():
    layer, x = nn.Linear(2, 3), torch.randn(4, 2)
    expected = layer(x)
    whole = layer.forward
    layer.forward = lambda values: whole(values) + 1
    give_base(layer, Doubled)
    assert torch.equal(layer(x), 2 * (expected + 1)) and "forward" not in vars(layer)


def _shifted(module, x):
    return nn.functional.linear(x, module.weight, module.bias) + 1


@pytest.mark.parametrize("bind", [types.MethodType, functools.partial])
def test_a_copy_has_a_forward_of_its_own(bind):
    """As a copy has before: methods and partials (those of Accelerate's hooks) refer to the copied module."""
    layer, x = nn.Linear(2, 3), torch.randn(4, 2)
    for mixin in (Doubled, Negative):
        layer.forward = bind(_shifted, layer)
        give_base(layer, mixin)
    expected = layer(x)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.fill_(2.0)
    assert torch.equal(other(x), torch.full((4, 3), -3.0)) and torch.equal(layer(x), expected)


def test_wrapped_forwards_have_an_order_and_the_signature_of_the_former():
    layer, x = nn.Linear(2, 3), torch.randn(4, 2)
    layer.forward = functools.partial(nn.Linear.forward, layer)  # one that a program has set
    expected, signature = layer(x), inspect.signature(layer.forward)
    wrap_forward(layer, lambda module, former, *args: former(*args) + module.shift)
    wrap_forward(layer, lambda module, former, *args, **kwargs: 2 * former(*args, **kwargs))
    layer.shift = 1.0
    assert torch.equal(layer(x), 2 * (expected + 1.0)) and "forward" not in vars(layer)
    assert list(inspect.signature(layer.forward).parameters) == list(signature.parameters) == ["input"]
    other = copy.deepcopy(layer)
    other.shift = 0.0
    assert torch.equal(other(x), 2 * expected) and torch.equal(layer(x), 2 * (expected + 1.0))
