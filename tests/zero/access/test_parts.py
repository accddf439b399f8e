"""Parts of a sharded model that are called by themselves, and weights that a custom autograd function saves."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.zero import GatheredParameters
from tests.harness import on_ranks
from tests.zero.access.support import config


class Stack(nn.Module):
    """Blocks behind an embedding that is another module's weight."""

    def __init__(self, shared: nn.Embedding) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.embed.weight = shared.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 7)) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


class Pair(nn.Module):
    """Two stacks on one shared embedding, as encoder-decoder models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, 7)
        self.encoder, self.decoder = Stack(self.shared), Stack(self.shared)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.encoder(ids) * self.decoder(ids.flip(0))).mean()


class Product(torch.autograd.Function):
    """Saves a weight and asks for its status in backward, as fused losses do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.detach().t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        requested.append(weight.ds_status)
        with GatheredParameters([weight]):
            return gradient @ weight, gradient.t() @ x


requested: list[ZeroParamStatus] = []


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(7, 7)
        self.head = nn.Linear(7, 9, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.head.weight
        with GatheredParameters([weight]):
            return Product.apply(self.body(x), weight).square().mean()


@on_ranks(2)
def test_parts_are_called_by_themselves() -> None:
    torch.manual_seed(1)
    model = Pair()
    plain = copy.deepcopy(model)
    engine = deepspeed.initialize(model=model, config=config(3))[0]
    ids = torch.tensor([3, 1, 4, 1, 5])
    for _ in range(3):
        with torch.no_grad():
            # The encoder alone, the alias of the shared weight alone, and the whole.
            assert torch.equal(model.encoder(ids), plain.encoder(ids))
            assert torch.equal(model.decoder.embed(ids), plain.decoder.embed(ids))
            assert torch.equal(engine(ids), plain(ids))
        assert all(parameter.numel() == 0 for parameter in model.parameters())
    loss, expected = engine(ids), plain(ids)
    engine.backward(loss)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
    with pytest.raises(TypeError, match="must be Tensor"), torch.no_grad():
        model.encoder("no tensor")
    with torch.no_grad():
        model.encoder(ids)  # a failed call leaves nothing open


@on_ranks(2)
def test_a_saved_weight_has_its_status() -> None:
    requested.clear()
    torch.manual_seed(1)
    model = Head()
    plain = copy.deepcopy(model)
    engine = deepspeed.initialize(model=model, config=config(3))[0]
    x = torch.randn(4, 7) + dist.get_rank()
    loss = engine(x)
    engine.backward(loss)
    assert requested == [ZeroParamStatus.AVAILABLE]
    reference = plain.head(plain.body(x)).square().mean()
    torch.testing.assert_close(loss, reference)
    reference.backward()
    gradient = plain.head.weight.grad
    dist.all_reduce(gradient)
    found = deepspeed.utils.safe_get_full_grad(model.head.weight)
    torch.testing.assert_close(found, gradient / dist.get_world_size(), rtol=1e-5, atol=1e-6)
    engine.step()
    for name in dir(torch.Tensor):
        getattr(torch.Tensor, name)  # as torch.compile does
    assert not hasattr(torch.zeros(3), "ds_status") and not hasattr(nn.Parameter(torch.zeros(3)), "ds_status")
