"""Cut layers by themselves: outputs, gradients, and how often something travels."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.comm.base.counters import traffic
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.differentiable import gather_from, reduce_scatter_to, scatter_to
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.module_inject.layers import (
    GateUpPack_LinearLayer,
    HiddenParallelEmbedding,
    LinearAllreduce,
    LinearAllreduceWithReplicatedInput,
    LinearLayer,
    SubParamLinearAllreduce,
    SubParamLinearLayer,
    VocabParallelEmbedding,
)
from deepspeed.parallel.tensor.channel import connect
from deepspeed.parallel.tensor.linear import ColumnLinear, CutLinear, RowLinear, SharedInputs
from deepspeed.parallel.tensor.regions import SplitParts
from deepspeed.parallel.tensor.sequence import CutSequence
from deepspeed.parallel.tensor.split import Split, even
from deepspeed.parallel.tensor.vocabulary import (
    CutEmbedding,
    VocabularyEmbedding,
    WidthEmbedding,
    vocab_parallel_cross_entropy,
)
from tests.harness import on_ranks, run_ranks
from tests.parallel.tensor.test_marks import Unit


class Gated(nn.Module):
    """A gated MLP of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(7, 11), nn.Linear(7, 11, bias=False), nn.Linear(11, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def _cut(model: Gated, channel, split: Split) -> list[tuple[int, int]]:
    shared_inputs = SharedInputs(channel)
    for name, layer in model.named_children():
        dim = 1 if name == "down" else 0
        layer.__class__ = RowLinear if dim else ColumnLinear
        layer.tensor_cut = CutLinear(channel, shared_inputs, split, name)
        for parameter in (layer.weight, *(() if dim or layer.bias is None else (layer.bias,))):
            parameter.data = torch.cat(
                [parameter.data.narrow(dim, a, b - a) for a, b in split.intervals(channel.rank)], dim
            )
    return split.intervals(channel.rank)


def _asked(name: str) -> int:
    return traffic.requested_along[name, "tensor"].calls


def _linear(channel) -> None:
    whole, cut = Gated(), Gated()
    (mine,) = _cut(cut, channel, Split.evenly(11, channel.size))
    x = torch.randn(3, 4, 7, requires_grad=True)
    y = whole(x)
    y.square().sum().backward()
    expected, x.grad = x.grad, None
    before = _asked("all_reduce")
    found = cut(x)
    assert _asked("all_reduce") - before == 1
    found.add_(0.0)  # in place, as programs do: what leaves a layer is no view
    found.square().sum().backward()
    assert _asked("all_reduce") - before == 2  # the two layers' input shares one
    torch.testing.assert_close(found, y)
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(cut.up.weight.grad, whole.up.weight.grad[slice(*mine)])
    torch.testing.assert_close(cut.gate.bias.grad, whole.gate.bias.grad[slice(*mine)])
    torch.testing.assert_close(cut.down.weight.grad, whole.down.weight.grad[:, slice(*mine)])
    torch.testing.assert_close(cut.down.bias.grad, whole.down.bias.grad)


def _awkward_backwards(channel) -> None:
    """One user of an input gets no gradient; recomputation; a graph kept for a second backward; autocast."""
    whole, cut = Gated(), Gated()
    _cut(cut, channel, Split.evenly(11, channel.size))
    x = torch.randn(2, 7, requires_grad=True)
    for use in (
        lambda model: model.down(torch.sigmoid(model.gate(x)) * model.up(x).detach()),
        lambda model: checkpoint(model, x, use_reentrant=False),
        lambda model: checkpoint(model, x, use_reentrant=True),
        lambda model: model(x) + model(x),
    ):
        x.grad = None
        use(whole).square().sum().backward()
        wanted, x.grad = x.grad, None
        use(cut).square().sum().backward()
        torch.testing.assert_close(x.grad, wanted)
    y = cut(x).square().sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = cut(x), whole(x)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    cut.down.tensor_cut.sequence = CutSequence(channel)
    x = torch.randn(1, 2 * channel.size, 7)
    mine = slice(2 * channel.rank, 2 * channel.rank + 2)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = cut(x), whole(x)[:, mine]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def _embeddings(channel) -> None:
    torch.manual_seed(3)
    ids = torch.tensor([[0, 12, 5], [4, 4, 12]])
    for kind, dim, extent in ((VocabularyEmbedding, 0, 13), (WidthEmbedding, 1, 6)):
        whole = nn.Embedding(13, 6, padding_idx=4)
        cut = nn.Embedding(13, 6, padding_idx=4, _weight=whole.weight.detach().clone())
        split = Split.evenly(extent, channel.size)
        low, high = split.intervals(channel.rank)[0]
        cut.__class__, cut.tensor_cut = kind, CutEmbedding(channel, split, "embedding", 4)
        cut.weight.data = cut.weight.data.narrow(dim, low, high - low).contiguous()
        found, expected = cut(ids), whole(ids)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(cut.weight.grad, whole.weight.grad.narrow(dim, low, high - low))
    with pytest.raises(IndexError, match="ids lie between 0 and 13, but the vocabulary has the ids 0 to 12"):
        cut.__class__ = VocabularyEmbedding
        cut.tensor_cut = CutEmbedding(channel, Split.evenly(13, channel.size), "embedding")
        cut(torch.tensor([0, 13]))


def _loss(channel) -> None:
    whole = torch.randn(2, 4, 13, requires_grad=True)
    targets = torch.tensor([[1, 12, -100, 6], [0, -100, 3, 12]])
    expected = F.cross_entropy(whole.view(-1, 13), targets.view(-1))
    expected.backward()
    low, high = even(13, channel.size, channel.rank)
    mine = whole.detach()[..., low:high].clone().requires_grad_()
    found = vocab_parallel_cross_entropy(mine, targets, channel, 13).sum() / (targets != -100).sum()
    found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mine.grad, whole.grad[..., low:high])


def _regions(channel) -> None:
    parts = SplitParts(Split.evenly(5, channel.size))
    x = torch.randn(2, 5, requires_grad=True)
    weights = torch.randn(2, 5)
    joined = gather_from(scatter_to(x, channel, parts), channel, parts)
    assert torch.equal(joined, x)
    (joined * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    long = torch.randn(2, 2 * channel.size, 3, requires_grad=True)
    part = scatter_to(long, channel, 1)
    again = gather_from(part * 2, channel, 1, is_partial=False)
    assert torch.equal(again, long * 2)
    again.sum().backward()
    assert torch.equal(long.grad, torch.full_like(long, 2.0))
    partial = gather_from(part.detach().requires_grad_(), channel, 1, is_partial=True)
    summed = reduce_scatter_to(partial, channel, 1)
    torch.testing.assert_close(summed, channel.size * part)


class _WholeCopies(TorchDispatchMode):
    """Counts operations that write a copy of at least ``numel`` elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        names = ("cat", "stack", "clone", "copy_", "_to_copy")
        if func.overloadpacket.__name__ in names and result.numel() >= self.numel:
            self.count += 1
        return result


@on_ranks(2)
@pytest.mark.parametrize(("lead", "copies"), [((), 0), ((1,), 0), ((3,), 0), ((3, 4), 0), ((17,), 4)])
def test_sequences_are_joined_and_cut_without_copies(lead: tuple[int, ...], copies: int) -> None:
    """Of a whole activation. With many dimensions before the cut one each transfer makes a single copy."""
    size, rank = dist.get_world_size(), dist.get_rank()
    channel = connect(Job.adopt(), Mesh((("tensor", size),)), None, None)
    torch.manual_seed(rank)
    dim = len(lead)
    part = torch.randn(*lead, 4, 5, requires_grad=True)
    factor = torch.randn(*lead, 4 * size, 5)
    with _WholeCopies(factor.numel()) as counted:
        whole = gather_from(part, channel, dim, is_partial=True)
        summed = reduce_scatter_to(whole * factor, channel, dim)
        summed.backward(part.detach())
    assert counted.count == copies
    parts = [torch.empty_like(part) for _ in range(size)]
    factors = [torch.empty_like(factor) for _ in range(size)]
    dist.all_gather(parts, part.detach())
    dist.all_gather(factors, factor)
    joined = torch.cat(parts, dim)
    assert torch.equal(whole, joined)
    for found, terms in ((summed, factors), (part.grad, factors)):  # both multiply what was gathered from the parts
        assert torch.equal(found, sum(joined * each for each in terms).chunk(size, dim)[rank])


@on_ranks(2)
def test_packed_layers_made_by_programs() -> None:
    """Layers with several tensors in one weight: each rank has its part of each, and exports are whole."""
    size, mpu = dist.get_world_size(), Unit(dist.get_world_size())
    group = mpu.get_tensor_model_parallel_group()

    class Program(nn.Module):
        def __init__(self, is_cut: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.qkv, self.pair = nn.Linear(6, 18), nn.Linear(12, 6)
            self.gated, self.head = nn.Linear(6, 16, bias=False), nn.Linear(8, 4)
            self.ranks = size if is_cut else 1
            if is_cut:
                self.qkv = SubParamLinearLayer(self.qkv, group, shape=(3, -1), partition_dim=0, name="qkv")
                self.pair = SubParamLinearAllreduce(self.pair, group, (-1, (6, 6)))
                self.gated = GateUpPack_LinearLayer(self.gated, group)
                self.head = LinearAllreduce(self.head, group)

        def forward(self, values):
            query, key, value = self.qkv(values).chunk(3, -1)
            mixed = self.pair(torch.cat([query * key, value], -1))
            gate, up = self.gated(mixed).chunk(2, -1)
            return self.head(gate.sigmoid() * up)

    whole, cut = Program(False), Program(True)
    values = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(cut(values), whole(values))
    cut(values).square().sum().backward()
    whole(values).square().sum().backward()
    torch.testing.assert_close(cut.pair.bias.grad, whole.pair.bias.grad)
    cut.zero_grad()
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (cut, whole))
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0}
    engine = deepspeed.initialize(model=cut, mpu=mpu, config=config, optimizer=optimizer)[0]
    engine.backward(engine(values).square().sum())
    engine.step()
    other.step()
    found = dict(engine.export_weights())
    for name, value in whole.state_dict().items() if found else ():
        torch.testing.assert_close(found[name], value)
    engine.destroy()
    head = LinearAllreduceWithReplicatedInput(nn.Linear(4, 3), group)
    assert head(torch.ones(2, 4)).shape == (2, 3)
    with pytest.raises(DeepSpeedConfigError, match=r"shape=\(\(4, 2, 2\), -1\)\): .*equal tensors"):
        SubParamLinearLayer(nn.Linear(2, 8), group, shape=((4, 2, 2), -1))
    with pytest.raises(DeepSpeedConfigError, match=r"partition_dim=1\): expected 0, .* Use SubParamLinearAllreduce"):
        SubParamLinearLayer(nn.Linear(2, 8), group, shape=(2, -1), partition_dim=1)
    with pytest.raises(DeepSpeedConfigError, match="which 2 packed tensors cannot share evenly over the 2 ranks"):
        GateUpPack_LinearLayer(nn.Linear(2, 6), group)


@on_ranks(2)
def test_layers_made_by_programs() -> None:
    """``deepspeed.module_inject``'s layers from whole ones and a process group, and an engine that takes them."""
    size, place, mpu = dist.get_world_size(), dist.get_rank(), Unit(dist.get_world_size())
    group = mpu.get_tensor_model_parallel_group()

    class Program(nn.Module):
        def __init__(self, is_cut: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.words, self.places = nn.Embedding(12, 6, padding_idx=4), nn.Embedding(12, 6)
            self.up, self.down, self.head = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 12, bias=False)
            if is_cut:
                self.words, self.places = (
                    VocabParallelEmbedding(self.words, group),
                    HiddenParallelEmbedding(self.places, group),
                )
                self.up, self.down = LinearLayer(self.up, group), LinearAllreduce(self.down, group)
                self.head = LinearLayer(module=self.head, mp_group=group, is_gathered=True, name="head")

        def forward(self, ids):
            return self.head(self.down(self.up(self.words(ids) + self.places(ids)).relu()))

    whole, cut = Program(False), Program(True)
    ids = torch.tensor([[0, 11, 5], [4, 4, 3]])
    found, expected = cut(ids), whole(ids)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for name, dim in {"words": 0, "places": 1, "up": 0, "down": 1, "head": 0}.items():
        gradient = getattr(whole, name).weight.grad.chunk(size, dim)[place]
        torch.testing.assert_close(getattr(cut, name).weight.grad, gradient)
    torch.testing.assert_close(cut.down.bias.grad, whole.down.bias.grad)
    cut.zero_grad()
    engine = deepspeed.initialize(
        model=cut, mpu=mpu, config={"train_micro_batch_size_per_gpu": 2}, optimizer=torch.optim.SGD(cut.parameters())
    )[0]
    full = engine._consolidated_16bit_state_dict()
    assert full is None or all(torch.equal(full[name], value) for name, value in whole.state_dict().items())
    engine.destroy()
    taken = LinearLayer(nn.Linear(6, 4), group, skip_partition=True)
    assert taken.weight.shape == (4, 6) and taken(torch.ones(1, 6)).shape == (1, 4)
    alone = LinearAllreduce(nn.Linear(3, 5))
    assert alone(torch.ones(1, 3)).shape == (1, 5)
    with pytest.raises(TypeError, match="expected a torch.nn.Linear that is whole, found Conv1d"):
        LinearLayer(nn.Conv1d(1, 1, 1), group)
    with pytest.raises(DeepSpeedConfigError, match=r"dimension 1 of its weight has 1 indices, fewer than the"):
        LinearAllreduce(nn.Linear(1, 5), group)
    with pytest.raises(DeepSpeedConfigError, match="max_norm, sparse and scale_grad_by_freq need all rows"):
        VocabParallelEmbedding(nn.Embedding(4, 4, sparse=True), group)


def _layers() -> None:
    channel = connect(Job.adopt(), Mesh((("tensor", dist.get_world_size()),)), None, None)
    _linear(channel)
    _awkward_backwards(channel)
    _embeddings(channel)
    _loss(channel)
    _regions(channel)


@pytest.mark.parametrize("size", [2, 3])
def test_layers_compute_what_whole_ones_do(size):
    run_ranks(_layers, size)
