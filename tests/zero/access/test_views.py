"""Views of sharded parameters, parts of a model that are called by themselves, weights that a function saves."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.zero import GatheredParameters
from deepspeed.zero.storage import FlatBuffer, StorageKind
from tests.engine.support import engine_of
from tests.harness import on_ranks
from tests.zero.access.support import Model, batch, build, config, train

# No bare view of freed memory survives: kept views give the numbers they had, or an exception; never a crash.


class Keeper(nn.Module):
    """Keeps every kind of view of its own weights, and of a foreign one, across forwards."""

    def __init__(self, foreign: nn.Module | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(63.0).reshape(9, 7) / 63)
        self.bias = nn.Parameter(torch.zeros(9))
        self.out = nn.Linear(9, 7)
        self.kept: dict[str, object] = {}
        self.foreign = [foreign]  # not a child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.kept
        kept["data"] = self.weight.data
        kept["detached"] = self.weight.detach()
        kept["transposed"] = self.weight.t()
        kept["row"] = self.weight[3]
        kept["rows"] = list(self.weight.unbind(0))
        kept["numpy"] = self.weight.detach().numpy()
        kept["iterator"] = iter(self.weight.detach())
        kept["storage"] = self.weight.untyped_storage()
        kept["dlpack"] = torch.from_dlpack(self.weight.detach())
        kept["closure"] = (lambda w: lambda: w.sum())(self.weight.data)
        if self.foreign[0] is not None:
            kept["foreign"] = self.foreign[0].weight[:2]
            x = x + self.foreign[0].bias
        return x + self.out(torch.tanh(nn.functional.linear(x, self.weight, self.bias)))


class Slices(nn.Module):
    """Returns views of its weight: outputs that alias memory that is about to be freed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 6 * width).reshape(6, width))

    def forward(self, length: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.table[:length], {"last": self.table[-1]}


class KeepsViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([Keeper(None), Slices(7), nn.Linear(7, 7)])
        self.blocks.append(Keeper(self.blocks[2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.blocks[0](x)
        rows, more = self.blocks[1](2)  # used after their module was left
        x = self.blocks[2](x + rows) + more["last"]
        return self.blocks[3](x).square().mean()


def _numbers(value):
    if isinstance(value, list):
        return torch.stack([_numbers(v) for v in value])
    if callable(value):
        return value()
    if hasattr(value, "__next__"):
        return torch.stack(list(value))
    return torch.as_tensor(value)


def _fresh():
    torch.manual_seed(5)
    return KeepsViews()


def train_like(engine, rank):
    engine.backward(engine(batch(rank)))
    engine.step()
    train(engine, rank, 2, first=1)


@pytest.mark.parametrize("zero", [{}, {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}])
@on_ranks(2)
def test_views_that_modules_keep(rank, zero):
    stage = 3
    torch.manual_seed(5)
    plain = KeepsViews()
    torch.manual_seed(5)
    engine = deepspeed.initialize(model=KeepsViews(), config=config(stage, zero=zero))[0]
    weight = plain.blocks[0].weight.detach().clone()
    expected = {
        "data": weight, "detached": weight, "transposed": weight.t(), "row": weight[3], "rows": weight,
        "numpy": weight, "iterator": weight, "dlpack": weight, "closure": weight.sum(),
        "foreign": plain.blocks[2].weight[:2].detach(),
    }  # fmt: skip
    mine = list(engine.module.blocks[0].kept.items()), list(engine.module.blocks[3].kept.items())
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            loss = engine(batch(rank))
            if grad:
                plain_loss = plain(batch(rank))
                assert torch.equal(loss, plain_loss)
        engine.empty_partition_cache()
        assert engine.module.blocks[0].weight.shape == (0,)
        for keeper in (engine.module.blocks[0], engine.module.blocks[3]):
            for name, value in list(keeper.kept.items()):
                if name == "storage":
                    continue
                if name in ("data", "row") or keeper is engine.module.blocks[0] or name == "foreign":
                    torch.testing.assert_close(_numbers(value).detach(), expected[name], rtol=0, atol=0)
            # The storage object follows the bucket, whose memory is gone: reading raises.
            storage = keeper.kept["storage"]
            if storage.nbytes() == 0:
                with pytest.raises((IndexError, RuntimeError)):
                    storage[0]
    engine.backward(engine(batch(rank)))
    engine.step()
    train(engine, rank, 2, first=1)
    reference = deepspeed.initialize(model=_fresh(), config=config(0))[0]
    train_like(reference, rank)
    found, wanted = dict(engine.iter_full("fp32")), dict(reference.iter_full("fp32"))
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-7)
    return len(mine)


class SavesByItself(torch.autograd.Function):
    """Keeps the weight on its context, where saved-tensor hooks do not see it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight, gradient.t() @ torch.ones(gradient.shape[0], ctx.weight.shape[1])


class Custom(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.first = nn.Linear(5, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = SavesByItself.apply(x, block.weight.view(-1).view(7, 7)) + block.bias
        return x.square().mean()


@on_ranks(2)
def test_what_a_custom_function_saves_by_itself(rank):
    results = []
    for stage in (3, 0):
        torch.manual_seed(6)
        zero = {"stage3_max_reuse_distance": 0}
        engine = deepspeed.initialize(model=Custom(), config=config(stage, zero=zero))[0]
        train(engine, rank, 3)
        results.append(dict(engine.iter_full("fp32")))
    for name, value in results[1].items():
        torch.testing.assert_close(results[0][name], value, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_views_kept_from_gathered_parameters():
    engine = build(3)
    params = dict(engine.module.named_parameters())
    with GatheredParameters(params.values()):
        kept = {name: p.data.view(-1) for name, p in params.items()}
        wanted = {name: p.detach().clone().view(-1) for name, p in params.items()}
    with GatheredParameters(params["blocks.0.rise.weight"]):
        single = params["blocks.0.rise.weight"].data
    for name in kept:
        assert torch.equal(kept[name], wanted[name]), name
    assert torch.equal(single.view(-1), wanted["blocks.0.rise.weight"])
    kept["blocks.0.rise.weight"].zero_()  # of nobody else's concern
    with GatheredParameters(params.values()):
        assert torch.equal(params["blocks.0.rise.weight"].view(-1), wanted["blocks.0.rise.weight"])


@on_ranks(2)
def test_ordinary_training_leaves_no_memory_behind(rank):
    moved = []
    leave = FlatBuffer._leave_to_others
    FlatBuffer._leave_to_others = lambda self: (moved.append(self), leave(self))[1]
    try:
        engine = deepspeed.initialize(model=Model(), config=config(3, zero={"stage3_max_reuse_distance": 0}))[0]
        train(engine, rank, 4)
        with torch.no_grad():
            engine(batch(rank))
        with GatheredParameters(engine.module.parameters(), modifier_rank=0):
            pass
    finally:
        FlatBuffer._leave_to_others = leave
    assert not moved


@on_ranks(2)
def test_a_view_that_fixes_the_size_of_its_memory():
    """``numpy()`` and ``share_memory_()`` forbid to resize a storage for good, also when the view is gone."""
    kept = []
    uses = (
        lambda p: p.detach().numpy(),
        lambda p: p.detach().share_memory_(),
        lambda p: kept.append((p.detach().numpy(), p.detach().clone())),
    )
    for use in uses:
        torch.manual_seed(3)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        engine = engine_of(model, 3, zero={"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0})
        weight = model[1].weight

        def run_use(*_, use=use, weight=weight):
            use(weight)

        handle = model[1].register_forward_hook(run_use)
        losses = []
        for _ in range(3):
            losses.append(engine(torch.ones(2, 8)).square().mean())
            engine.backward(losses[-1])
            engine.step()
            assert engine._runtime.memory_tracker.live(StorageKind.GATHERED) == 0
            assert not any(b.full.tensor.untyped_storage().nbytes() for b in engine._runtime.buckets)
        assert losses[2] < losses[1] < losses[0]
        with GatheredParameters(weight):
            use(weight)
        handle.remove()
        engine.destroy()
    assert all(torch.equal(torch.from_numpy(array), values) for array, values in kept)


# Parts of a sharded model that are called by themselves, and weights that a custom autograd function saves.


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
