"""deepspeed.initialize takes models from wherever they are: sharded, plain, mixed, on meta, from another engine."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.zero import GatheredParameters, Init
from tests.harness import on_ranks
from tests.zero.access.support import Model, batch, build, config, new_block, train
from tests.zero.construction import odd_modules as odd


def values_of(engine, kind="fp32"):
    return {name: value.clone() for name, value in engine.iter_full(kind)}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize(
    ("stage", "ranks", "bf16", "threshold"),
    [
        (3, 2, False, 0),
        (3, 3, True, 0),
        (3, 2, True, 100_000),
        (2, 2, True, 0),
        (1, 2, False, 0),
        (0, 2, True, 0),
        (3, 1, True, 0),
    ],
)
@on_ranks()
def test_a_model_built_in_shards_trains_as_one_built_whole(rank, stage, bf16, threshold):
    more = {"bf16": {"enabled": True}} if bf16 else {}
    zero = {"stage3_param_persistence_threshold": threshold}
    plain = build(stage, zero=zero, **more)
    torch.manual_seed(3 + rank)  # rank 0's values count
    with Init(config_dict_or_path=config(3, **more), dtype=torch.float32):
        model = Model()
    engine = deepspeed.initialize(model=model, config=config(stage, zero=zero, **more))[0]
    assert_same(values_of(plain), values_of(engine))  # masters are made from the values before the cast
    for each in (plain, engine):
        train(each, rank, 2)
    assert_same(values_of(plain), values_of(engine))
    assert_same(values_of(plain, "param"), values_of(engine, "param"))
    named = dict(engine.module.named_parameters())
    assert hasattr(named["first.weight"], "ds_id") == (stage == 3)


class Pair(nn.Module):
    def __init__(self, inner: nn.Module, outer: nn.Module) -> None:
        super().__init__()
        self.inner, self.outer = inner, outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.outer.last.bias.sum()


@pytest.mark.parametrize("stage", [3, 2])
@on_ranks(2)
def test_a_mixture_of_sharded_and_plain_modules(rank, stage):
    torch.manual_seed(7)
    whole = Pair(Model(), Model())
    torch.manual_seed(7)
    with Init():
        inner = Model()
        inner_weight = inner.first.weight
    assert inner_weight.shape == (0,)
    mixed = Pair(inner, Model())  # sharded and plain
    # A weight made outside and put into a sharded module, as resized embeddings are.
    with GatheredParameters([inner.first.weight], modifier_rank=0):
        replacement = nn.Parameter(inner.first.weight.detach().clone())
        inner.first.weight = replacement
    optimizer = torch.optim.AdamW([p for p in mixed.parameters() if p.requires_grad], lr=0.01, weight_decay=0.01)
    settings = config(stage)
    del settings["optimizer"]
    engine = deepspeed.initialize(model=mixed, optimizer=optimizer, config=settings)[0]
    reference = deepspeed.initialize(model=whole, config=config(stage))[0]
    assert engine.optimizer.optimizer is optimizer
    for each in (engine, reference):
        train(each, rank, 2)
    assert_same(values_of(engine), values_of(reference))
    assert dict(mixed.named_parameters())["inner.first.weight"] is replacement


def copy_of(values, stage):
    model = Model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return deepspeed.initialize(model=model, config=config(stage))[0]


@pytest.mark.parametrize(("first", "second"), [(3, 3), (3, 1), (2, 3), (0, 0)])
@on_ranks(2)
def test_a_second_initialize_takes_the_model_over(rank, first, second):
    torch.manual_seed(3)
    model = Model()
    old = deepspeed.initialize(model=model, config=config(first))[0]
    train(old, rank, 1)
    old(batch(rank))  # leaves a forward without backward, and gathered parameters
    before = values_of(old)
    new = deepspeed.initialize(model=model, config=config(second))[0]
    assert_same(before, values_of(new))
    with pytest.raises(CallOrderError, match="another deepspeed.initialize"):
        old(batch(rank))
    train(new, rank, 1, first=1)
    reference = copy_of(before, second)
    train(reference, rank, 1, first=1)
    assert_same(values_of(new), values_of(reference))
    old.destroy()
    old.destroy()
    train(new, rank, 1, first=2)
    new.destroy()


def copy_trained(values, rank):
    engine = copy_of(values, 3)
    train(engine, rank, 1, first=1)
    return engine


@on_ranks(2)
def test_deepcopy_of_a_sharded_model(rank):
    engine = build(3)
    train(engine, rank, 1)
    before = values_of(engine)
    # A copy of the sharded model is sharded, has its own values, and needs no communication to be made.
    twin = copy.deepcopy(engine.module)
    single = copy.deepcopy(engine.module.first.weight)
    train(engine, rank, 1, first=1)
    assert all(p.shape == (0,) or p.ds_numel == 0 for p in twin.parameters())
    with GatheredParameters(twin.parameters()), GatheredParameters(single):
        for name, parameter in twin.named_parameters():
            assert torch.equal(parameter, before[name]), name
        assert torch.equal(single, before["first.weight"])
        twin_again = copy.deepcopy(twin)  # of gathered parameters: whole
    assert all(type(p) is nn.Parameter and p.shape == before[n].shape for n, p in twin_again.named_parameters())
    reference = deepspeed.initialize(model=twin, config=config(3))[0]
    assert_same(values_of(reference), before)
    train(reference, rank, 1, first=1)
    assert_same(values_of(reference), values_of(copy_trained(before, rank)))


# -- meta ------------------------------------------------------------------------------------------------------------


class OnMeta(nn.Module):
    """Standard layers, a block with attention, running statistics, and initial values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.last = nn.Linear(8, 3)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x[:, 0]) * self.scale).square().mean()


class Unfinished(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), Scaled())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class LibraryStyle(nn.Module):
    """Initial values come from one method of the whole model, which knows every kind of module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(new_block(7) for _ in range(2))
        self.first = nn.Linear(5, 7)
        self.scaled = Scaled()
        self.register_buffer("table", torch.arange(4.0))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)
            nn.init.constant_(module.bias, 0.25)
        elif isinstance(module, Scaled):
            nn.init.constant_(module.scale, 2.0)
        elif isinstance(module, LibraryStyle):
            module.table.copy_(torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean() * self.table.sum() * self.scaled.scale.mean()


@pytest.mark.parametrize("stage", [3, 1])
@on_ranks(2)
def test_modules_on_the_meta_device_get_values(rank, stage):
    torch.manual_seed(rank)
    with torch.device("meta"):
        model = OnMeta()
    weight = model.blocks[0].linear1.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = config(stage)
    del settings["optimizer"]
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    assert model.blocks[0].linear1.weight is weight
    values = values_of(engine)
    assert all(value.isfinite().all() for value in values.values())
    assert values["scale"].eq(3).all() and values["norm.weight"].eq(1).all()
    assert 0.1 < values["first.weight"].std() < 0.5 and values["blocks.0.self_attn.in_proj_bias"].eq(0).all()
    assert model.norm.running_var.eq(1).all() and model.norm.num_batches_tracked == 0
    everywhere = [None, None]
    dist.all_gather_object(everywhere, values)
    assert_same(*everywhere)
    train(engine, rank, 2)
    with torch.device("meta"):
        library = LibraryStyle()
    engine = deepspeed.initialize(model=library, config=config(stage))[0]
    values = values_of(engine)
    assert values["first.bias"].eq(0.25).all() and values["scaled.scale"].eq(2).all()
    assert 0.3 < values["blocks.1.rise.weight"].std() < 0.7 and library.table.tolist() == [0, 1, 2, 3]
    train(engine, rank, 1)


@on_ranks(2)
def test_a_module_that_nothing_can_initialize_is_named():
    with torch.device("meta"):
        model = Unfinished()
    with pytest.raises(DeepSpeedConfigError) as caught:
        deepspeed.initialize(model=model, config=config(3))
    message = str(caught.value)
    assert "'scale'" in message and "'inner.1'" in message and "zero.Init" in message


# -- contexts and late modules ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_initialize_inside_a_context_suspends_it(rank):
    with Init(config_dict_or_path=config(3), dtype=torch.float32):
        model = Model()
        engine = deepspeed.initialize(model=model, config=config(3))[0]
        after = nn.Linear(3, 3)
    assert after.weight.shape == (0,)
    train(engine, rank, 1)


@pytest.mark.parametrize("stage", [3, 0])
@on_ranks(2)
def test_modules_attached_after_initialize_run(rank, stage):
    engine = build(stage)
    before = values_of(engine)
    engine.module.blocks.append(new_block(7))  # it runs, untrained
    late = {name: p.detach().clone() for name, p in engine.module.blocks[-1].named_parameters()}
    train(engine, rank, 2)
    after = values_of(engine)
    assert before.keys() == after.keys() and not torch.equal(before["first.weight"], after["first.weight"])
    for name, parameter in engine.module.blocks[-1].named_parameters():
        assert torch.equal(parameter, late[name])


@on_ranks(2)
def test_a_tied_and_oddly_built_model_trains(rank):
    with Init():
        model = odd.InitializesAtTheEnd()
    engine = deepspeed.initialize(model=model, config=config(3))[0]
    tokens = torch.arange(6).reshape(2, 3) + rank
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert engine.module.head.weight is engine.module.embedding.weight


@on_ranks(2)
def test_a_configured_adagrad_on_a_model_built_in_shards() -> None:
    """Torch's own makes its state of every parameter at once, and a sharded one has no values."""
    adagrad = {"type": "Adagrad", "params": {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.3}}
    plain = build(3, optimizer=adagrad)
    torch.manual_seed(3)
    with Init(config_dict_or_path=config(3), dtype=torch.float32):
        model = Model()
    engine = deepspeed.initialize(model=model, config=config(3, optimizer=adagrad))[0]
    torch.manual_seed(3)
    whole = Model()
    optimizer = torch.optim.Adagrad(whole.parameters(), lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3)
    client = deepspeed.initialize(model=whole, optimizer=optimizer, config=config(3))[0]
    for each in (plain, engine, client):
        train(each, dist.get_rank(), 2)
    assert_same(values_of(plain), values_of(engine))
    assert_same(values_of(client), values_of(engine))


@on_ranks(1)
def test_neither_16_bit_dtype_is_squeezed_into_the_other() -> None:
    model = nn.Sequential(nn.Linear(5, 5).half(), nn.Linear(5, 5).bfloat16())
    with torch.no_grad():
        model[0].weight.fill_(1 + 2**-10)
        model[1].weight.fill_(1e20)
    engine = deepspeed.initialize(model=model, config=config(1, bf16={"enabled": True}))[0]
    values = values_of(engine)
    assert float(values["0.weight"][0, 0]) == 1 + 2**-10  # the master; bf16 rounds it
    assert engine.module[1].weight[0, 0].item() > 9e19
