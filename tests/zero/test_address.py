"""What a sharded parameter is to code that looks at it: attributes, refusals, copies, printing."""

import copy
import io
import pickle
from multiprocessing.context import set_spawning_popen

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import deepspeed
from deepspeed.errors import ShardedAccessError
from deepspeed.zero import (
    GatheredParameters,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.cases import Plain, seeded
from tests.harness.logged import logged
from tests.zero.access.support import Model, batch, build, config, train

COMPUTING = {
    "sum": lambda p: p.sum(), "norm": lambda p: p.norm(), "index": lambda p: p[0], "add": lambda p: p + 1,
    "radd": lambda p: 1 + p, "matmul": lambda p: torch.ones(3, 15) @ p, "tolist": lambda p: p.tolist(),
    "item": lambda p: p.item(), "numpy": lambda p: p.numpy(), "float()": lambda p: float(p), "bool": lambda p: bool(p),
    "clone": lambda p: p.clone(), "view": lambda p: p.view(-1), "T": lambda p: p.T, "iter": lambda p: list(p),
    "eq": lambda p: p == 0, "torch.sum": torch.sum, "stack": lambda p: torch.stack([p]), "equal": lambda p: p.equal(p),
    "data.sum": lambda p: p.data.sum(), "data.norm": lambda p: p.data.norm(), "data.index": lambda p: p.data[0],
    "fill_": lambda p: p.fill_(1), "data.fill_": lambda p: p.data.fill_(1), "normal_": lambda p: nn.init.normal_(p),
    "data.copy_": lambda p: p.data.copy_(torch.zeros(0)), "setitem": lambda p: p.__setitem__(0, 1),
    "assign data": lambda p: setattr(p, "data", torch.ones(15, 7)), "half": lambda p: p.half(),
    "to": lambda p: p.to("meta"), "isnan": torch.isnan, "out": lambda p: torch.ones(1, out=p),
    "functional": lambda p: nn.functional.linear(torch.ones(1, 7), p), "pin_memory": lambda p: p.pin_memory(),
    "type": lambda p: p.type(torch.float64), "storage": lambda p: p.untyped_storage(), "pickle": pickle.dumps,
    "dlpack": lambda p: p.__dlpack__(), "torch.save": lambda p: torch.save(p, io.BytesIO()), "copy": copy.copy,
    "asarray": np.asarray,
    "data.numpy": lambda p: p.data.numpy(), "data.data_ptr": lambda p: p.data.data_ptr(),
    "data.data": lambda p: p.data.data.sum(), "data.pickle": lambda p: pickle.dumps(p.data),
    "detach.norm": lambda p: p.detach().norm(), "detach.numpy": lambda p: p.detach().numpy(),
    "detach.cpu": lambda p: p.detach().cpu(), "detach.detach": lambda p: p.detach().detach().clone(),
    "detach.tolist": lambda p: p.detach().tolist(), "detach.storage": lambda p: p.detach().untyped_storage(),
    "detach.dlpack": lambda p: p.detach().__dlpack__(), "detach.deepcopy": lambda p: copy.deepcopy(p.detach()),
    "detach.torch.tensor": lambda p: torch.tensor(p.detach()), "data.set_": lambda p: torch.ones(1).set_(p.data),
    "data.as_subclass": lambda p: p.data.as_subclass(torch.Tensor), "func": lambda p: torch.func.vjp(abs, p.data),
    "detach.Tensor": lambda p: torch.Tensor(p.detach()), "from_dlpack": lambda p: torch.from_dlpack(p),
    "torch.detach": lambda p: torch.detach(p).sum(), "detach.isfinite": lambda p: torch.isfinite(p.detach()).all(),
    "detach.copy_": lambda p: torch.ones(0).copy_(p.detach()), "detach.lerp_": lambda p: p.detach().lerp_(p, 0.5),
}  # fmt: skip


NOT_WHEN_FULL = (  # what torch itself refuses on a CPU, or for the shape
    "item", "float()", "bool", "data.copy_", "out", "to", "half", "assign data", "pin_memory", "dlpack", "detach.copy_",
    "from_dlpack",
)  # fmt: skip


@on_ranks(2)
def test_computing_on_a_sharded_parameter_raises_and_names_the_remedy():
    engine = build(3)
    weight = dict(engine.module.named_parameters())["blocks.0.rise.weight"]
    with torch.no_grad():
        for name, compute in COMPUTING.items():
            with pytest.raises(ShardedAccessError) as caught:
                compute(weight)
            text = str(caught.value)
            assert "blocks.0.rise.weight" in text and "GatheredParameters" in text, name
            assert "safe_get_full_fp32_param" in text and "(15, 7)" in text, name
    with GatheredParameters(weight), torch.no_grad():
        for name, compute in COMPUTING.items():
            if name not in NOT_WHEN_FULL:
                compute(weight)
    train(engine, dist.get_rank(), 1)


@on_ranks(2)
def test_a_model_moved_as_a_whole_leaves_its_shards_with_the_engine():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from deepspeed.zero.address import _keeps_dtype

    engine = build(3)
    weight = dict(engine.module.named_parameters())["blocks.0.rise.weight"]
    with logged() as lines:
        engine.module.cpu()
        assert not lines
        with FakeTensorMode():  # a device that this machine need not have
            there, there_in_half = torch.empty(0, device="cuda"), torch.empty(0, device="cuda", dtype=torch.half)
        for _ in range(2):
            assert _keeps_dtype(lambda empty: there, (weight,), {})
    assert not _keeps_dtype(lambda empty: there_in_half, (weight,), {})
    if dist.get_rank() == 0:
        assert len(lines) == 1 and "moving the model to cuda:0" in lines[0], lines
        assert "engine.destroy()" in lines[0]
    train(engine, dist.get_rank(), 1)


@on_ranks(2)
def test_metadata_passes():
    engine = build(3, bf16={"enabled": True})
    weight = dict(engine.module.named_parameters())["blocks.0.rise.weight"]
    assert weight.shape == (0,) and weight.size() == (0,) and weight.numel() == 0 and weight.dim() == 1
    assert weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_floating_point()
    assert weight.requires_grad and weight.is_leaf and weight.grad is None and weight.layout is torch.strided
    assert weight.data.shape == (0,) and weight.data.dtype == torch.bfloat16 and weight.data.numel() == 0
    assert weight.detach().shape == (0,) and weight.detach().dtype == torch.bfloat16
    assert hash(weight) == id(weight) and weight in {weight} and weight is engine.module.blocks[0].rise.weight
    assert isinstance(weight, nn.Parameter) and isinstance(weight, torch.Tensor)
    assert weight.data_ptr() == 0 and weight.element_size() == 2 and weight.type() == "torch.BFloat16Tensor"
    text = repr(weight)
    assert "blocks.0.rise.weight" in text and "(15, 7)" in text and "bfloat16" in text and "2 ranks" in text
    assert "Linear(in_features=7, out_features=15" in str(engine.module)
    str(nn.ParameterList([weight]))
    for like in (torch.zeros_like(weight), torch.full_like(weight, 2, dtype=torch.float32), torch.randn_like(weight)):
        assert type(like) is torch.Tensor and like.shape == (15, 7) and like.device == weight.device
    assert torch.zeros_like(weight).dtype == torch.bfloat16 and not torch.zeros_like(weight).any()
    weight.requires_grad_(False).requires_grad_(True)
    # Moving a module to where it is changes nothing; changing its dtype would lose the shards.
    assert engine.module.to("cpu") is engine.module and engine.module.bfloat16() is engine.module
    engine.module.to(torch.bfloat16)
    with pytest.raises(ShardedAccessError):
        engine.module.float()
    assert len(list(engine.module.parameters())) == len(list(Model().parameters()))
    names = [name for name, _ in engine.module.named_parameters()]
    assert names == [name for name, _ in Model().named_parameters()]
    engine.backward(engine(batch(dist.get_rank(), dtype=torch.bfloat16)))
    engine.step()


def _attributes(stage, threshold):
    engine = build(stage, zero={"stage3_param_persistence_threshold": threshold})
    params = dict(engine.module.named_parameters())
    plain = dict(Model().named_parameters())
    if stage < 3:
        for parameter in params.values():
            for name in ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "partition_numel", "all_gather"):
                assert not hasattr(parameter, name), name
        assert not hasattr(engine.module, "ds_external_parameters")
        return None
    resident = threshold > 0 or dist.get_world_size() == 1
    for name, parameter in params.items():
        assert parameter.ds_shape == plain[name].shape and isinstance(parameter.ds_shape, torch.Size)
        assert parameter.ds_numel == plain[name].numel() and isinstance(parameter.ds_id, int)
        assert parameter.ds_param_type is ZeroParamType.PARTITIONED and parameter.ds_persist == resident
        wanted = ZeroParamStatus.AVAILABLE if resident else ZeroParamStatus.NOT_AVAILABLE
        assert parameter.ds_status is wanted and parameter.ds_status == wanted
        assert parameter.partition_numel() == parameter.ds_tensor.numel() and parameter.ds_tensor.dim() == 1
        assert parameter.ds_zero_partition_world_size == dist.get_world_size()
        assert parameter.ds_active_sub_modules == set()
        parameter.ds_active_sub_modules.clear()
        assert parameter.ds_summary()["ds_numel"] == plain[name].numel()
        total = torch.tensor([parameter.partition_numel()])
        dist.all_reduce(total)
        assert total == plain[name].numel() * (dist.get_world_size() if resident else 1)
        before = parameter.ds_id
        with GatheredParameters(parameter):
            assert parameter.ds_status is ZeroParamStatus.AVAILABLE and parameter.ds_id == before
    assert len({p.ds_id for p in params.values()}) == len(params)
    assert not hasattr(nn.Linear(2, 2).weight, "ds_id") and not hasattr(nn.Linear(2, 2), "ds_external_parameters")
    weight = params["first.weight"]
    weight.ds_status_of_mine = 3  # names of one's own are no business of ours
    weight.all_gather([weight, params["last.bias"]])
    assert weight.shape == (7, 5) and weight.ds_status is ZeroParamStatus.AVAILABLE
    weight.partition([weight, params["last.bias"]])
    assert resident or weight.shape == (0,)
    weight.all_gather()
    with torch.no_grad():
        weight.fill_(3.0)
    weight.partition(has_been_updated=True)
    with GatheredParameters(weight):
        assert weight.eq(3).all()
    ids = [parameter.ds_id for parameter in params.values()]
    return [number - min(ids) for number in ids]


@pytest.mark.parametrize(
    ("stage", "threshold", "ranks"), [(3, 0, 2), (3, 0, 3), (3, 100_000, 2), (3, 0, 1), (2, 0, 2), (0, 0, 2)]
)
def test_ds_attributes(stage, threshold, ranks):
    ids = run_ranks(_attributes, ranks, stage, threshold)
    assert all(found == ids[0] for found in ids)


@on_ranks(2)
def test_state_dict_gives_placeholders_with_one_line():
    engine = build(3)
    with logged() as lines:
        state = engine.module.state_dict()
        engine.module.state_dict()
        kept = engine.module.state_dict(keep_vars=True)
        for lose in (pickle.dumps, copy.deepcopy, lambda s: torch.save(s, io.BytesIO()), lambda s: save_file(s, "no")):
            with pytest.raises(ShardedAccessError, match=r"on parameter '.*GatheredParameters"):
                lose(state)
        with pytest.raises(ShardedAccessError, match=r"pickling \(torch.save.*GatheredParameters"):
            pickle.dumps(engine.module)
        set_spawning_popen(object())
        try:  # as what a loader's new processes are given
            whole = pickle.loads(pickle.dumps(engine.module))
        finally:
            set_spawning_popen(None)
        with GatheredParameters(engine.module.parameters()):
            full = {name: value.clone() for name, value in engine.module.state_dict().items()}
        with pytest.raises(ShardedAccessError, match="load_checkpoint"):
            engine.module.load_state_dict(full)
        with GatheredParameters(engine.module.parameters(), modifier_rank=0):
            if dist.get_rank() == 0:
                engine.module.load_state_dict({name: value * 2 for name, value in full.items()})
    assert all(value.numel() == 0 for value in state.values())
    assert all(kept[name] is parameter for name, parameter in engine.module.named_parameters())
    assert all(type(p) is nn.Parameter and p.numel() == 0 for p in whole.parameters())
    whole.state_dict()
    if dist.get_rank() == 0:
        notices = [line for line in lines if "placeholder" in line or "size 0" in line]
        assert sum(line.startswith("state_dict()") for line in notices) == 1
        assert sum(line.startswith("starting a process") for line in notices) == 1
    for name, value in engine.iter_full("fp32"):
        assert torch.equal(value, full[name] * 2), name


@on_ranks(1, 2, 3)
def test_an_averaged_model_of_torch_follows_or_raises():
    for stage in range(4):
        engine = build(stage)
        torch.manual_seed(3)
        plain = Model()
        average = get_ema_multi_avg_fn(0.5)
        with GatheredParameters(engine.module.parameters()):
            plain.load_state_dict({name: value.clone() for name, value in engine.module.state_dict().items()})
        models = [AveragedModel(model, multi_avg_fn=average) for model in (engine.module, plain)]
        for number in range(3):
            if stage == 3 and dist.get_world_size() > 1:
                with pytest.raises(ShardedAccessError, match="detach|to on parameter|copy_|GatheredParameters"):
                    models[0].update_parameters(engine.module)
            both = [*engine.module.parameters(), *models[0].parameters()]
            with GatheredParameters(both, modifier_rank=0), torch.no_grad():
                for parameter, value in zip(engine.module.parameters(), plain.parameters(), strict=True):
                    parameter.add_(number)
                    value.add_(number)
                for averaged, model in zip(models, (engine.module, plain), strict=True):
                    averaged.update_parameters(model)
        with GatheredParameters(list(models[0].parameters())):
            for found, expected in zip(*(model.parameters() for model in models), strict=True):
                torch.testing.assert_close(found.float(), expected, rtol=1e-6, atol=1e-6)


class Raw(nn.Module):
    """Reads a foreign weight by its memory, as a custom kernel would."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x):
        address, nbytes = self.second.weight.data_ptr(), self.second.weight.untyped_storage().nbytes()
        assert address == self.second.weight.data.data_ptr() != 0 and nbytes >= 7 * 7 * 4
        assert self.second.weight.tolist() == self.second.weight.detach().numpy().tolist()
        return self.second(self.first(x)).sum()


@on_ranks(2)
def test_the_memory_of_a_parameter_is_that_of_its_values_inside_a_forward():
    torch.manual_seed(3)
    engine = deepspeed.initialize(model=Raw(), config=config(3))[0]
    engine.backward(engine(torch.ones(2, 7)))
    engine.step()


class Scaled(nn.Parameter):
    """A class of parameters of somebody's own."""


@on_ranks(2)
def test_parameters_of_a_class_of_their_own():
    torch.manual_seed(3)
    model = Model()
    model.blocks[0].rise.weight = Scaled(model.blocks[0].rise.weight.detach())
    model.blocks[0].rise.weight.purpose = "kept"
    engine = deepspeed.initialize(model=model, config=config(3))[0]
    weight = engine.module.blocks[0].rise.weight
    with GatheredParameters(weight):
        assert type(weight) is Scaled
    with GatheredParameters(engine.module.parameters()):
        assert type(weight) is Scaled and weight.purpose == "kept"
        twin = copy.deepcopy(weight)
        assert type(twin) is Scaled and twin.shape == (15, 7) and not hasattr(twin, "ds_id")
    assert type(copy.deepcopy(weight)).__name__ == "ShardedParameter"
    train(engine, dist.get_rank(), 2)


# -- uses outside the own module -------------------------------------------------------------------------------------


class Foreign(nn.Module):
    """Uses of parameters where their module does not run: all found without being told."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.positions = nn.ModuleList([nn.Embedding(9, width)])  # never called
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions[0].weight[: tokens.shape[1]]
        for number, block in enumerate(self.blocks):
            x = x + torch.tanh(block(x)) * self.scale[number % 2]
            x = x + nn.functional.linear(x, self.blocks[0].weight, self.blocks[(number + 1) % 3].bias)
        # A foreign weight as a constant, and tied logits by hand.
        x = x * self.blocks[1].weight.detach().mean() + self.blocks[2].weight.data.sum()
        logits = self.head(x) + nn.functional.linear(x, self.embedding.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("zero", [{}, {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}])
@on_ranks(2)
def test_parameters_used_outside_their_module(rank, ranks, zero):
    def decayed(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)

    tokens = [torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    plain, model = Plain(Foreign, decayed), seeded(Foreign)
    register_external_parameter(model.head, model.blocks[0].weight)
    engine = deepspeed.initialize(model=model, config=config(3, zero=zero))[0]
    for _ in range(3):
        loss = engine(tokens[rank])
        engine.backward(loss)
        engine.step()
        expected = plain.step(lambda model, of: model(tokens[of]))
        torch.testing.assert_close(loss, expected[rank], rtol=1e-5, atol=1e-6)
    plain.assert_masters(engine, rtol=1e-4)
    listed = list(model.head.ds_external_parameters())
    assert [p for _, p in listed] == [model.blocks[0].weight] and not list(model.blocks[0].ds_external_parameters())
    assert {id(p) for _, p in model.head.all_parameters()} == {id(model.head.weight), id(model.blocks[0].weight)}
    unregister_external_parameter(model.head, model.blocks[0].weight)
    assert not list(model.head.ds_external_parameters())
    with pytest.raises(ValueError, match="not registered"):
        unregister_external_parameter(model.head, model.blocks[0].weight)
    with pytest.raises(ValueError, match="Tensor"):
        register_external_parameter(model.head, torch.ones(2))
