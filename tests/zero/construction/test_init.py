"""zero.Init: modules are sharded as they are built, whatever their construction looks like."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.base.counters import counted
from deepspeed.errors import DeepSpeedConfigError, DivergenceError, NotYetSupportedError, ShardedAccessError
from deepspeed.zero import GatheredParameters, Init, MiCS_Init, ZeroParamStatus, register_external_parameter
from deepspeed.zero.construction.modules import serving_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.zero.construction import odd_modules as odd

BF16 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}


def full_values(model):
    with GatheredParameters(model.parameters()):
        return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def same_everywhere(values):
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {name: value.cpu() for name, value in values.items()})
    return all(torch.equal(everywhere[0][name], other[name]) for other in everywhere for name in values)


@on_ranks(1, 2, 3)
def test_the_model_is_the_one_that_is_built_without(ranks):
    # Every rank draws other numbers; rank 0's count.
    torch.manual_seed(1)
    expected = odd.InitializesAtTheEnd()
    torch.manual_seed(1 + dist.get_rank())
    with Init():
        model = odd.InitializesAtTheEnd()
        if ranks > 1:
            weight = model.blocks[0].qkv.weight
            assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
            assert weight.shape == weight.ds_shape == (18, 6)  # constructors read sizes
            assert odd.ScalesOneByOne().full_at_once == 1  # what was used before is given back
    assert ranks == 1 or weight.shape == (0,)
    assert torch.zeros(2).dtype == torch.float32
    found = full_values(model)
    assert same_everywhere(found)
    for name, parameter in expected.named_parameters(remove_duplicate=False):
        assert torch.equal(found[name], parameter), name
    assert model.head.weight is model.embedding.weight
    assert found["blocks.0.c_proj.bias"].eq(3).all() and found["blocks.1.c_proj.bias"].eq(4).all()
    for parameter in model.parameters():
        assert parameter.ds_status is (ZeroParamStatus.NOT_AVAILABLE if ranks > 1 else ZeroParamStatus.AVAILABLE)
    shared = sum(p.partition_numel() for p in model.parameters())
    total = torch.tensor([shared])
    dist.all_reduce(total)
    assert total == sum(p.numel() for p in expected.parameters())


@on_ranks(2)
def test_odd_constructions():
    with Init():
        early, late = odd.ReturnsEarly(5), odd.ReturnsEarly(5, plain=False)
        grown = odd.AddsLater(4).grow()
        described, decorated, dynamic = odd.Described(7), odd.DecoratedInit(), odd.dynamic(6)

        class Local(odd.NoSuperSubclassHook):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.full((8,), 3.0))
                self.inner = nn.Linear(3, 3)

        parent = nn.ModuleList([Local(), grown])
        outside = nn.ModuleDict({"a": early, "b": late, "c": described, "d": decorated, "e": dynamic})
        orphan = nn.Linear(2, 2)
        orphan.register_parameter("extra", nn.Parameter(torch.ones(4)))
        sequence = nn.Sequential(nn.Linear(2, 3), nn.LSTM(3, 4), nn.MultiheadAttention(4, 2), nn.BatchNorm1d(4))
        with pytest.raises(LookupError):
            odd.FailsHalfway()
        lazy = nn.LazyLinear(3)
    for module in (parent, outside, orphan, sequence):
        for name, parameter in module.named_parameters():
            assert parameter.shape == (0,) and parameter.ds_numel > 0, name
    values = full_values(outside)
    assert values["b.extra"].eq(1).all() and values["c.weight"].eq(5).all() and values["d.after"].eq(1).all()
    assert full_values(parent)["1.late"].eq(2).all() and full_values(parent)["0.weight"].eq(3).all()
    assert not hasattr(lazy.weight, "ds_id")
    # Outside, everything is as before: classes, constructors, instances.
    plain = odd.ReturnsEarly(3)
    assert plain.weight.shape == (3, 3) and not hasattr(plain.weight, "ds_id")
    assert "__init_subclass__" not in vars(nn.Module)
    assert not hasattr(nn.Linear.__init__, "__wrapped__")
    assert torch.Tensor([1.0]).dtype == torch.float32 and "__new__" not in vars(torch.Tensor)


@on_ranks(2)
def test_dtypes_and_kinds_of_parameters():
    with Init(config_dict_or_path=BF16):
        model = odd.Mixed()
        assert torch.zeros(2).dtype == torch.bfloat16
        assert torch.tensor([1.0]).dtype == torch.bfloat16
        assert torch.tensor([1]).dtype == torch.int64
        assert torch.full((2,), 1.0, dtype=torch.float64).dtype == torch.bfloat16
        assert torch.Tensor([1.0, 2.0]).dtype == torch.bfloat16
        assert torch.arange(3).dtype == torch.int64 and torch.arange(3.0).dtype == torch.bfloat16
        with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
            assert torch.empty(3).device.type == "meta"
    assert model.table.dtype == torch.bfloat16 and model.ids.dtype == torch.int64
    values = full_values(model)
    assert values["weight"].dtype == torch.bfloat16 and values["count"].dtype == torch.int64
    assert torch.equal(values["weight"], (torch.arange(10.0).bfloat16() / 7))
    assert torch.equal(values["count"], torch.arange(5))
    assert values["scalar"].shape == () and values["scalar"] == 2.5 and values["nothing"].shape == (0, 4)
    assert model.again is model.weight and not model.frozen.requires_grad
    with Init(dtype=torch.float16, config_dict_or_path=BF16):  # the argument wins
        assert full_values(nn.Linear(3, 2))["weight"].dtype == torch.float16
    with Init(
        config={
            "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
            "fp16": {"enabled": "auto"},
            "train_batch_size": "auto",
            "optimizer": {"params": {"lr": "auto"}},
            "unheard_of": 1,
        }
    ):
        assert torch.ones(1, dtype=torch.float64).dtype == torch.float32


@on_ranks(2)
def test_the_constructor_wrapper_is_looked_up_upstream_on_entry():
    from deepspeed.runtime.zero import partition_parameters as pp

    original, seen = pp.zero_wrapper_for_fp_tensor_constructor, []

    def replacement(fn, *args, **kwargs):
        seen.append(fn)
        if fn is pp._orig_torch_arange:
            assert kwargs["target_device"] == torch.device(pp.get_accelerator().device_name())
            return lambda *inner, **named: fn(*inner, **named)
        return original(fn, *args, **kwargs)

    context = Init(config_dict_or_path=BF16)
    pp.zero_wrapper_for_fp_tensor_constructor = replacement
    try:
        with context:
            assert torch.arange(0, 4, dtype=torch.float32).dtype == torch.float32
            assert torch.ones(2).dtype == torch.bfloat16
            # The context inside sees the true constructors too.
            with Init(config_dict_or_path=BF16):
                assert torch.arange(0, 4, dtype=torch.float32).dtype == torch.float32
    finally:
        pp.zero_wrapper_for_fp_tensor_constructor = original
    assert len(seen) == 16 and len(set(seen)) == 8
    assert torch.arange is pp._orig_torch_arange and torch.arange(2.0).dtype == torch.float32
    with context:
        assert torch.arange(0, 4, dtype=torch.float32).dtype == torch.bfloat16
    assert len(seen) == 16


@on_ranks(2)
def test_nested_disabled_and_suspended():
    with Init(config_dict_or_path=BF16):
        outer = nn.Linear(3, 3)
        with Init(enabled=False):
            unchanged = nn.Linear(3, 3)
        with Init(dtype=torch.float32):
            inner = nn.Linear(3, 3)
        again = nn.Linear(3, 3)
        with deepspeed.zero.construction.modules.suspended():
            ordinary = nn.Linear(3, 3)
        last = nn.Linear(3, 3)
    for module, dtype in (
        (outer, torch.bfloat16),
        (unchanged, torch.bfloat16),
        (inner, torch.float32),
        (again, torch.bfloat16),
        (last, torch.bfloat16),
    ):
        assert module.weight.shape == (0,) and module.weight.dtype == dtype
    assert ordinary.weight.shape == (3, 3) and ordinary.weight.dtype == torch.float32
    with Init(enabled=False), Init(enabled=False, remote_device="nvme", config_dict_or_path={"nonsense": {}}):
        plain = nn.Linear(3, 3)
    assert plain.weight.shape == (3, 3) and not hasattr(plain.weight, "ds_id")
    with MiCS_Init(config_dict_or_path=BF16):
        weight = nn.Linear(2, 2).weight
    assert weight.shape == (0,)


@on_ranks(2)
def test_an_existing_module_and_a_remote_device():
    torch.manual_seed(dist.get_rank())
    model = odd.InitializesAtTheEnd()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    Init(module=model, config_dict_or_path={"zero_optimization": {"stage": 3}})
    assert all(p.shape == (0,) for p in model.parameters())
    values = full_values(model)
    assert same_everywhere(values)
    if dist.get_rank() == 0:
        assert all(torch.equal(values[name], before[name]) for name in before)
    with Init(remote_device="cpu"):
        assert nn.Linear(3, 3).weight.ds_tensor.device.type == "cpu"


@on_ranks(2)
def test_passes_over_a_built_model_reach_copies():
    """The library's tying of weights pads the bias of a copied head (RT-DETR, D-FINE)."""
    with Init():
        first = nn.Linear(3, 5)
    model = nn.ModuleList([first, copy.deepcopy(first)])
    before = full_values(model)
    with serving_all_ranks():
        model[1].bias.data = nn.functional.pad(model[1].bias.data, (0, 0)) + 1
    assert all(p.shape == (0,) for p in model.parameters())
    found = full_values(model)
    assert torch.equal(found["1.bias"], before["0.bias"] + 1) and torch.equal(found["0.bias"], before["0.bias"])


@on_ranks(2)
def test_weight_normalized_convolutions():
    """The pattern of the wav2vec family: parametrised while gathered, registered as external."""
    with Init():
        convolution = nn.Conv1d(4, 4, 3)
        with GatheredParameters(convolution.weight, modifier_rank=0):
            convolution = nn.utils.parametrizations.weight_norm(convolution, name="weight", dim=2)
        parent = nn.Module()
        for parameter in convolution.parametrizations.weight.parameters():
            register_external_parameter(parent, parameter)
    assert convolution.parametrizations.weight.original0.ds_shape == (1, 1, 3)
    return [name for name, _ in convolution.named_parameters()]


def _refused():
    with pytest.raises(NotYetSupportedError, match="zero_param_parallel_group"):
        Init(zero_param_parallel_group=object())
    with pytest.raises(DeepSpeedConfigError, match="int32"):
        Init(dtype=torch.int32)
    with pytest.raises(DeepSpeedConfigError, match="keep one"):
        Init(config={"a": 1}, config_dict_or_path={"b": 1})
    with pytest.raises(DeepSpeedConfigError, match="stag"):
        Init(config_dict_or_path={"zero_optimization": {"stag": 3}})
    with pytest.raises(ZeroDivisionError), Init():
        model = nn.Linear(3, 3)
        raise ZeroDivisionError
    assert nn.Linear(2, 2).weight.shape == (2, 2)
    with pytest.raises(ShardedAccessError, match="GatheredParameters"):
        model.weight.sum()


def test_what_is_refused_and_what_an_exception_leaves():
    run_ranks(_refused, 2)


@on_ranks(2)
def test_ranks_that_build_different_models_all_raise():
    with pytest.raises(DivergenceError) as caught, Init():
        nn.Linear(3, 3)
        nn.Linear(3, 4 + dist.get_rank())
    message = str(caught.value)
    assert "(4, 3)" in message and "(5, 3)" in message


@on_ranks(2)
def test_only_shares_are_sent():
    width, depth = 64, 20
    with Init(), counted() as traffic:
        model = odd.Normalized(width, depth)
    module = width * width + width
    sent = torch.tensor([traffic.requested["move"].nbytes])
    dist.all_reduce(sent)
    share = -(-module // 128) * 64
    assert sent == 4 * depth * (module - share)  # rank 0 gave rank 1 its half of each, and nothing else traveled
    held = sum(p.ds_tensor.numel() for p in model.parameters())
    assert held <= depth * (module // 2 + 64)


@on_ranks(2, backend=None)
def test_the_process_group_is_started_if_there_is_none():
    assert not dist.is_initialized()
    with Init():
        model = nn.Linear(3, 3)
    assert dist.is_initialized()
    assert full_values(model)["weight"].shape == (3, 3)


def test_it_is_silent_and_costs_nothing_when_disabled(caplog):
    with caplog.at_level(logging.DEBUG), Init(enabled=False):
        assert nn.Linear(2, 2).weight.shape == (2, 2)
    assert not caplog.records


# -- constructors that read sizes --------------------------------------------------------------------------------------


class ReadsSizes(nn.Module):
    """Reads sizes and values of layers that are built already, as torch's own wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        child = nn.Linear(4, 5)
        child.load_state_dict({"weight": torch.arange(20.0).view(5, 4) / 20, "bias": torch.ones(5)})
        self.child = child
        self.rows, self.columns, self.dims = child.weight.size(0), child.weight.shape[1], child.weight.dim()
        self.numel, self.length = sum(p.numel() for p in self.parameters()), len(child.weight)
        self.twin = nn.Linear(child.weight.shape[0], child.weight.size(1))
        self.old = nn.utils.spectral_norm(nn.Linear(4, 6))
        self.new = nn.utils.parametrizations.spectral_norm(nn.Conv1d(6, 3, 1))
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
        self.scale = nn.Parameter(torch.ones_like(child.bias).new_ones(self.weighted.weight.shape[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.old(self.twin(self.child(x)))
        return (self.weighted(self.new(x[..., None]).squeeze(-1)) * self.scale).square().mean()


@on_ranks(1, 2, 3)
def test_constructors_read_full_sizes() -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    torch.manual_seed(1)
    plain = ReadsSizes()
    torch.manual_seed(1)
    with Init(config_dict_or_path=settings):
        model = ReadsSizes()
        late = nn.utils.spectral_norm(nn.Linear(3, 2))  # outside any constructor
    assert late.weight_u.shape == (2,)
    for name in ("rows", "columns", "dims", "numel", "length"):
        assert getattr(model, name) == getattr(plain, name), name
    found = full_values(model)
    for name, parameter in plain.named_parameters():
        assert torch.equal(found[name], parameter), name
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, msg=name)
    engine = deepspeed.initialize(model=model, config=settings)[0]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x))
        engine.step()
        plain(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = full_values(engine.module)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)
