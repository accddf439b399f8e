"""Activation checkpointing: the same numbers with less kept, in every variant."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing import checkpointing as settings_module
from deepspeed.activation_checkpointing.checkpointing import ActivationShard, Partition
from deepspeed.activation_checkpointing.feature import recompute_attention
from deepspeed.comm.job.job import Job, axis_of
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.offload import activations
from tests.engine.support import SHARDED, adamw
from tests.harness import on_ranks, run_ranks
from tests.harness.logged import logged

checkpointing = deepspeed.checkpointing


@pytest.fixture(autouse=True)
def fresh():
    settings_module.settings = settings_module.Settings()
    checkpointing.get_cuda_rng_tracker().reset()
    yield
    settings_module.settings = settings_module.Settings()
    checkpointing.get_cuda_rng_tracker().reset()


@pytest.fixture
def lines():
    with logged() as collected:
        yield collected


class Block(nn.Module):
    """Two layers with dropout; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8))
        self.calls = 0

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        return self.layers(x) + (0 if extra is None else extra)


def gradients(run, **settings) -> list[torch.Tensor]:
    torch.manual_seed(3)
    block = Block()
    x = torch.randn(4, 8, requires_grad=True)
    extra = torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(4)
    run(block, x, extra).square().sum().backward()
    return [x.grad, extra.grad, *(p.grad for p in block.parameters()), torch.tensor(block.calls)]


VARIANTS = {
    "positional": lambda block, x, extra: checkpointing.checkpoint(block, x, extra),
    "keyword": lambda block, x, extra: checkpointing.checkpoint(block, x, extra=extra),
    "nested": lambda block, x, extra: checkpointing.checkpoint(
        lambda p: block(p[0], extra=p[1]["e"]), (x, {"e": extra})
    ),
    "non_reentrant": lambda block, x, extra: checkpointing.non_reentrant_checkpoint(block, x, extra),
}


@pytest.mark.parametrize("in_cpu", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_gradients_and_dropout(variant, in_cpu):
    checkpointing.configure(None, checkpoint_in_cpu=in_cpu, synchronize=True)
    *expected, _ = gradients(lambda block, x, extra: block(x, extra))
    *found, calls = gradients(VARIANTS[variant])
    assert calls == 2
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_gradient_without_any_differentiable_argument():
    block, x = Block(), torch.randn(2, 8)
    checkpointing.checkpoint(block, x).sum().backward()
    assert all(p.grad is not None for p in block.parameters())


def test_several_outputs_and_no_grad():
    x = torch.randn(3, requires_grad=True)
    doubled, text = checkpointing.checkpoint(lambda t: (t * 2, "text"), x)
    doubled.sum().backward()
    assert text == "text" and x.grad.tolist() == [2.0] * 3
    block = Block()
    with torch.no_grad():
        checkpointing.checkpoint(block, x.new_ones(1, 8))
    assert block.calls == 1


def saved_bytes(run) -> int:
    """Bytes that autograd keeps for backward."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())


def test_only_the_input_is_kept():
    block, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.randn(128, 64, requires_grad=True)
    assert saved_bytes(lambda: checkpointing.checkpoint(block, x)) == x.nbytes
    assert saved_bytes(lambda: block(x)) > 5 * x.nbytes


@pytest.mark.parametrize("function", ["checkpoint", "non_reentrant_checkpoint"])
def test_kept_input_goes_to_the_host(function, monkeypatch):
    packed: list[torch.Tensor] = []
    pack = activations._SavedBlock.pack
    monkeypatch.setattr(activations._SavedBlock, "pack", lambda self, x: (packed.append(x), pack(self, x))[1])
    checkpointing.configure(None, checkpoint_in_cpu=True)
    x = torch.randn(4, 8, requires_grad=True)
    getattr(checkpointing, function)(Block(), x).sum().backward()
    assert any(tensor.shape == x.shape for tensor in packed)


def test_configure_sources_and_precedence():
    assert not checkpointing.is_configured()
    config = {"activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4, "profile": True}}
    checkpointing.configure(None, deepspeed_config=config, profile=False)
    now = settings_module.settings
    assert checkpointing.is_configured()
    assert (now.checkpoint_in_cpu, now.num_layers, now.profile, now.synchronize) == (True, 4, False, False)
    checkpointing.set_num_layers(7)
    assert now.num_layers == 7
    with pytest.raises(DeepSpeedConfigError, match="cpu_checkpoint"):
        checkpointing.configure(None, {"activation_checkpointing": {"cpu_checkpoint": True}})


def test_the_call_of_lightning():
    checkpointing.configure(
        mpu_=None,
        partition_activations=False,
        contiguous_checkpointing=None,
        checkpoint_in_cpu=None,
        profile=None,
    )
    assert checkpointing.is_configured()
    checkpointing.reset()


def test_partitioning_over_one_rank_is_nothing():
    alone = SimpleNamespace(get_model_parallel_world_size=lambda: 1)
    checkpointing.configure(alone, partition_activations=True)
    block, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))), torch.randn(128, 64, requires_grad=True)
    assert saved_bytes(lambda: checkpointing.checkpoint(block, x)) == x.nbytes


def _unit(*kinds, **more):
    sizes = {f"get_{kind}_parallel_world_size": lambda: 2 for kind in kinds}
    groups = {f"get_{kind}_parallel_group": lambda kind=kind: f"{kind} group" for kind in kinds}
    return SimpleNamespace(**sizes, **groups, **more)


@pytest.mark.parametrize(
    ("mpu", "group"),
    [
        (_unit("tensor_model", "model"), "tensor_model group"),  # as in Megatron, where "model" spans stages
        (_unit("slice", "model"), "slice group"),  # as a pipeline's grid
        (_unit("model"), "model group"),
        (_unit("model", initialize_sequence_parallel=None), None),
        (None, None),
    ],
)
def test_activations_are_divided_over_tensor_ranks_alone(mpu, group):
    options = settings_module.Settings(partition_activations=True, mpu=mpu)
    assert settings_module.partition_group(options) == group


def test_profile_logs_both_runs(lines):
    checkpointing.configure(None, profile=True)
    outer, inner = Block(), Block()
    x = torch.randn(2, 8, requires_grad=True)
    checkpointing.checkpoint(lambda t: checkpointing.checkpoint(inner, outer(t)), x).sum().backward()
    assert sum("checkpoint forward: " in line for line in lines) >= 2
    assert sum("checkpoint recomputation: " in line for line in lines) >= 2


def test_contiguous_buffers_get_a_notice_of_no_effect(monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(settings_module, "warn_once", lambda key, line: warnings.append(line))
    checkpointing.configure(None, contiguous_checkpointing=False)
    assert warnings == []
    checkpointing.configure(None, contiguous_checkpointing=True)
    assert len(warnings) == 1 and "contiguous_memory_optimization changes nothing" in warnings[0]


# --- named random states


def test_fork_draws_from_its_own_state():
    tracker = checkpointing.get_cuda_rng_tracker()
    checkpointing.model_parallel_cuda_manual_seed(10)
    plain = torch.rand(3)
    checkpointing.model_parallel_cuda_manual_seed(10)
    with tracker.fork():
        first = torch.rand(3)
    with tracker.fork():
        second = torch.rand(3)
    assert torch.equal(torch.rand(3), plain)  # the default state stood still
    assert not torch.equal(first, second) and not torch.equal(first, plain)
    states = tracker.get_states()
    with tracker.fork():
        third = torch.rand(3)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(3), third)


def test_seeds_differ_between_model_parallel_ranks():
    draws = []
    for rank in (0, 1):
        checkpointing.configure(
            SimpleNamespace(get_model_parallel_rank=lambda r=rank: r, get_model_parallel_world_size=lambda: 2)
        )
        checkpointing.model_parallel_cuda_manual_seed(10)
        default = torch.rand(1).item()
        with checkpointing.get_cuda_rng_tracker().fork():
            draws.append((default, torch.rand(1).item()))
    assert draws[0][0] == draws[1][0] and draws[0][1] != draws[1][1]


def test_reconfigured_seed():
    checkpointing.model_parallel_cuda_manual_seed(10)
    default = get_accelerator().get_rng_state()
    checkpointing.model_parallel_reconfigure_tp_seed(20)
    assert torch.equal(get_accelerator().get_rng_state(), default)
    with checkpointing.get_cuda_rng_tracker().fork():
        drawn = torch.rand(2)
    checkpointing.model_parallel_cuda_manual_seed(20)
    with checkpointing.get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(2), drawn)


def test_tracker_misuse_is_named():
    tracker = checkpointing.CudaRNGStatesTracker()
    tracker.add("mine", 1)
    with pytest.raises(ValueError, match="'mine': expected a new name"):
        tracker.add("mine", 2)
    with pytest.raises(ValueError, match="seed 1 is used"):
        tracker.add("other", 1)
    with pytest.raises(CallOrderError, match="'theirs' does not exist"), tracker.fork("theirs"):
        pass


@pytest.mark.parametrize("function", ["checkpoint", "non_reentrant_checkpoint"])
def test_recomputation_sees_the_named_state_of_the_first_run(function):
    def block(x: torch.Tensor) -> torch.Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            return torch.dropout(x * x, 0.5, train=True)

    checkpointing.model_parallel_cuda_manual_seed(10)
    x = torch.arange(1.0, 65.0, requires_grad=True)
    y = getattr(checkpointing, function)(block, x)
    with checkpointing.get_cuda_rng_tracker().fork():
        torch.rand(5)  # the state moves on between forward and backward
    before = checkpointing.get_cuda_rng_tracker().get_states()["model-parallel-rng"]
    y.sum().backward()
    assert torch.equal(checkpointing.get_cuda_rng_tracker().get_states()["model-parallel-rng"], before)
    mask = y.detach() != 0
    assert 0 < mask.sum() < 64 and torch.equal(x.grad, torch.where(mask, 4 * x.detach(), 0.0))


WIDTH = 9


class Mpu:
    """Neighboring pairs of ranks hold the same layers; ranks of equal place in their pair share data."""

    def __init__(self) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        model = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
        data = [dist.new_group(list(range(place, size, 2))) for place in (0, 1)]
        self._model, self._data = model[rank // 2], data[rank % 2]

    def get_model_parallel_group(self):
        return self._model

    def get_model_parallel_world_size(self):
        return dist.get_world_size(self._model)

    def get_model_parallel_rank(self):
        return dist.get_rank(self._model)

    def get_data_parallel_group(self):
        return self._data

    def get_data_parallel_world_size(self):
        return dist.get_world_size(self._data)

    def get_data_parallel_rank(self):
        return dist.get_rank(self._data)


class Net(nn.Module):
    """Blocks with dropout under a checkpoint, called with tensors, a mask of integers and a nested gradient."""

    def __init__(self, function=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.function = function

    def block(self, index, x, mask, scale=None):
        x = x + torch.dropout(torch.tanh(self.layers[index](x)), 0.3, train=True) * mask
        return x if scale is None else x * scale["s"]

    def forward(self, x):
        mask = torch.ones(WIDTH, dtype=torch.int64)
        scale = {"s": 1 + 0.1 * x.mean()}
        for index in range(len(self.layers)):
            more = (scale,) if index == 2 else ()
            if self.function is None:
                x = self.block(index, x, mask, *more)
            else:
                x = getattr(checkpointing, self.function)(self.block, index, x, mask, *more)
        return x.square().mean()


def _batch(step, group):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + group)).requires_grad_()


def _trained(mpu, stage, function, settings):
    checkpointing.configure(mpu, **settings)
    torch.manual_seed(3)
    model = Net(function)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **(SHARDED if stage == 3 else {})},
    }
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, mpu=mpu)[0]
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = engine(_batch(step, dist.get_rank() // 2))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = {name: value.clone() for name, value in engine.iter_full("fp32")}
    engine.destroy()
    return losses, found


def _same_numbers(stages):
    mpu = Mpu()
    for stage in stages:
        losses, plain = _trained(mpu, stage, None, {})
        for function in ("checkpoint", "non_reentrant_checkpoint"):
            for in_cpu in (False, True):
                settings = {"partition_activations": True, "checkpoint_in_cpu": in_cpu}
                mine, found = _trained(mpu, stage, function, settings)
                assert mine == losses
                for name, value in plain.items():
                    torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    settings_module.settings = settings_module.Settings()


def test_two_model_parallel_ranks():
    run_ranks(_same_numbers, 2, [0])


@pytest.mark.slow
def test_two_by_two_ranks_at_every_stage():
    run_ranks(_same_numbers, 4, [0, 2, 3])


@on_ranks(2)
def test_only_parts_are_kept():
    """What is alive between forward and backward: the parts, and no whole input but the first."""
    mpu = Mpu()
    checkpointing.configure(mpu, partition_activations=True)
    rows, inputs = 64, []

    def block(x):
        inputs.append(weakref.ref(x))
        return torch.tanh(x) * 2

    for shape in ((rows, 8), (5, 5, 5), (1,)):
        inputs.clear()
        x = first = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for _ in range(4):
            x = checkpointing.checkpoint(block, x)
        loss = x.sum()
        del x
        gc.collect()
        alive = [ref() is not None for ref in inputs]
        assert alive[1:] == ([False] * 3 if first.numel() > 1 else alive[1:])
        loss.backward()
        found, first.grad = first.grad, None
        y = first
        for _ in range(4):
            y = torch.tanh(y) * 2
        y.sum().backward()
        torch.testing.assert_close(found, first.grad, rtol=0, atol=0)
    hooks = Partition(axis_of(mpu.get_model_parallel_group(), "tensor"), on_host=True)
    whole = torch.arange(7.0)
    part = hooks.pack(whole)
    assert isinstance(part, ActivationShard) and part.values.numel() == 4
    assert part.values.tolist() == [[0, 1, 2, 3], [4, 5, 6, 0]][dist.get_rank()]
    assert torch.equal(hooks.unpack(part), whole)
    parameter, numbers = nn.Parameter(torch.ones(8)), torch.arange(8)
    assert hooks.pack(parameter) is parameter and hooks.pack(numbers) is numbers
    settings_module.settings = settings_module.Settings()


@on_ranks(2)
def test_heads_of_a_rank_are_not_partitioned() -> None:
    """Attention of a rank's heads is recomputed with these, though activations are partitioned."""
    checkpointing.configure(Mpu(), partition_activations=True)
    found: list = []
    model = nn.Module()
    model.__dict__["recompute_core_attention"] = found.append
    recompute_attention(Job.adopt(), model)
    x = torch.full((2, 3), 1.0 + dist.get_rank(), requires_grad=True)
    found[0](lambda heads: heads.square(), x * 1).sum().backward()
    assert torch.equal(x.grad, 2 * x)
    settings_module.settings = settings_module.Settings()
