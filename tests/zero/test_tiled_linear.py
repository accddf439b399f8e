"""A linear layer in tiles computes what a whole one does, sharded or not."""

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias
from tests.harness import on_ranks


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (3, 2), (7, 1), (2, 11)])
def test_like_a_whole_layer(in_splits, out_splits, has_bias):
    whole = nn.Linear(7, 11, bias=has_bias)
    tiled = TiledLinear(7, 11, has_bias, in_splits, out_splits, init_linear=whole)
    parts = TiledLinear(7, 11, has_bias, in_splits, out_splits, True, False, init_linear=whole)
    assert len(tiled.linears) == out_splits and len(tiled.linears[0]) == in_splits
    x = torch.randn(3, 2, 7, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, found = whole(x), tiled(y)
    torch.testing.assert_close(found, expected)
    sizes = [high - low for low, high in zip(parts.in_parts, parts.in_parts[1:], strict=False)]
    torch.testing.assert_close(torch.cat(parts(x.split(sizes, -1)), -1), expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    rows = [torch.cat([layer.weight.grad for layer in row], 1) for row in tiled.linears]
    torch.testing.assert_close(torch.cat(rows), whole.weight.grad)
    if has_bias:
        torch.testing.assert_close(torch.cat([row[-1].bias.grad for row in tiled.linears]), whole.bias.grad)


class _Apart(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight), self.bias


def test_both_import_paths():
    assert deepspeed.zero.TiledLinear is TiledLinear and deepspeed.zero.TiledLinearReturnBias is TiledLinearReturnBias


def test_a_bias_that_is_returned():
    whole = nn.Linear(6, 5)
    tiled = TiledLinearReturnBias(6, 5, in_splits=2, out_splits=2, linear_cls=_Apart, init_linear=whole)
    x = torch.randn(4, 6)
    output, bias = tiled(x)
    torch.testing.assert_close(output + bias, whole(x))
    assert TiledLinearReturnBias(6, 5, bias=False, out_splits=2, linear_cls=_Apart)(x)[1] is None


def test_what_does_not_fit_is_refused():
    with pytest.raises(DeepSpeedConfigError, match=r"TiledLinear\(in_splits=8\): expected 1 to 7 parts"):
        TiledLinear(7, 11, in_splits=8)
    with pytest.raises(DeepSpeedConfigError, match=r"a weight of shape \(11, 7\) with a bias, found \(11, 7\)"):
        TiledLinear(7, 11, init_linear=nn.Linear(7, 11, bias=False))
    with pytest.raises(DeepSpeedConfigError, match="expected the 2 parts of the input, found 1"):
        TiledLinear(7, 11, in_splits=2, input_is_already_split=True)([torch.ones(1, 7)])


@on_ranks(2)
def test_sharded() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    torch.manual_seed(0)
    whole = nn.Linear(10, 9)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    with deepspeed.zero.Init():
        tiled = TiledLinear(10, 9, in_splits=2, out_splits=3)
    tiled.copy_params_from(whole)
    engine = deepspeed.initialize(model=tiled, config=config)[0]
    for step in range(3):
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(step))
        expected, found = whole(x).square().mean(), engine(x).square().mean()
        torch.testing.assert_close(found, expected)
        expected.backward()
        plain.step()
        plain.zero_grad()
        engine.backward(found)
        engine.step()
