"""What crosses from one stage to the next, and odd models: the same losses on two stages as on one, bit by bit."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.pipe import PipelineModule
from tests.harness.pool import run_ranks

WIDTH = 4


def mean_square(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - labels).pow(2).mean()


def items(*rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(n, WIDTH, generator=made), torch.randn(n, WIDTH, generator=made)) for n in rows]


class Layer(nn.Module):
    """Two weights and a function of them and the input."""

    def __init__(self, function: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("fixed", torch.ones(2, WIDTH))
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(self, value)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


def nested(layer: Any, x: torch.Tensor) -> Any:
    y = layer.one(x)
    tensors = [y > 0, layer.two(x).detach(), y.to(torch.bfloat16), torch.arange(3)]
    return {"a": (y, None, True, 3, "s", y[:, ::2]), "b": tensors, "c": y.T, "none": torch.zeros(0, 3)}


def unnested(layer: Any, value: Any) -> torch.Tensor:
    y, nothing, flag, number, word, half = value["a"]
    mask, constant, low, whole = value["b"]
    assert (nothing, flag, number, word) == (None, True, 3, "s") and value["none"].shape == (0, 3)
    assert mask.dtype == torch.bool and not constant.requires_grad and whole.tolist() == [0, 1, 2]
    return layer.one(y) * mask + half.sum() + constant + low.float() + value["c"].T + layer.two(y)


def of_another_form(layer: Any, x: torch.Tensor) -> Any:
    """As many tensors, with gradients or not, as the number of rows determines."""
    y = layer.one(x)
    return [(y,), (y, None), (y.detach(), y)][len(x) % 3]


def sum_of_all(layer: Any, value: Any) -> torch.Tensor:
    return sum(layer.one(x) for x in value if x is not None)


def without_its_input(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The graph ends here for some micro-batches: no gradient goes back."""
    return layer.two.weight[:1].expand(3, WIDTH) if len(x) == 3 else x * layer.one.bias


# Name -> layers, where two stages are cut, rows of each micro-batch.
MODELS: dict[str, tuple[Callable[[], list[Any]], list[int], tuple[int, ...]]] = {
    "any nesting, dtype, None, constants, strides": (lambda: [Layer(nested), Layer(unnested)], [0, 1, 2], (2, 2, 2)),
    "another form and shape each time": (
        lambda: [Layer(of_another_form), Layer(sum_of_all)], [0, 1, 2], (1, 2, 3, 4, 5, 2)
    ),
    "one tensor twice": (
        lambda: [linear(), lambda x: (x, x), Layer(lambda s, v: s.one(v[0]) + v[1])], [0, 2, 3], (2, 2)
    ),
    "an output that nobody uses": (
        lambda: [Layer(lambda s, x: (s.one(x), s.two(x))), Layer(lambda s, v: s.one(v[0]))], [0, 1, 2], (2, 2)
    ),
    "a buffer crosses": (
        lambda: [Layer(lambda s, x: (s.one(x), s.fixed)), Layer(lambda s, v: s.one(v[0]) * v[1])], [0, 1, 2], (2, 2)
    ),
    "a view that is not dense": (
        lambda: [Layer(lambda s, x: s.one(x).T.expand(3, WIDTH, len(x))[1]), Layer(lambda s, v: s.one(v.T))], [0, 1, 2],
        (2, 2),
    ),
    "no gradient goes back from some": (lambda: [linear(), Layer(without_its_input)], [0, 1, 2], (2, 3, 2)),
    "a stage begins in place": (lambda: [linear(), nn.ReLU(inplace=True), linear()], [0, 1, 3], (2, 2)),
    "a frozen first stage": (lambda: [frozen(), linear()], [0, 1, 2], (2, 2)),
    "a frozen last stage": (lambda: [linear(), frozen()], [0, 1, 2], (2, 2)),
    "a last stage without parameters": (lambda: [linear(), nn.Tanh()], [0, 1, 2], (2, 2)),
    "one micro-batch": (lambda: [linear(), linear()], [0, 1, 2], (2,)),
}  # fmt: skip


def train(name: str, stages: int) -> tuple[list[float], list[float]]:
    layers, bounds, rows = MODELS[name]
    torch.manual_seed(0)
    module = PipelineModule(
        layers(), num_stages=stages, loss_fn=mean_square, partition_method=bounds if stages > 1 else "uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": len(rows),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.1,
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    losses, norms = [], []
    for _ in range(3):
        losses.append(engine.train_batch(iter(items(*rows))).item())
        norms.append(engine.get_global_grad_norm())
        losses.append(float(engine.eval_batch(iter(items(2, 2, 2)), num_micro_batches=3)))
    return losses, norms


def train_all(stages: int) -> dict[str, tuple[list[float], list[float]]]:
    return {name: train(name, stages) for name in MODELS}


@cache
def results(stages: int) -> list[dict[str, tuple[list[float], list[float]]]]:
    return run_ranks(train_all, stages, stages)


@pytest.mark.parametrize("name", MODELS)
def test_two_stages_train_as_one(name):
    (expected, norms), *_ = [result[name] for result in results(1)]
    for losses, found in (result[name] for result in results(2)):
        assert losses == expected
        assert found == pytest.approx(norms, rel=1e-6)
    assert expected[0] != expected[-2]
