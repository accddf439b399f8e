"""Activation checkpointing: the same numbers with less kept, in every variant."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing import settings as settings_module
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.logging import logger

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
    collected: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: collected.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield collected
    logger.removeHandler(handler)


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
    original = torch.autograd.graph.save_on_cpu

    class Recording(original):
        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (packed.append(tensor), pack(tensor))[1]

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Recording)
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


def test_profile_logs_both_runs(lines):
    checkpointing.configure(None, profile=True)
    outer, inner = Block(), Block()
    x = torch.randn(2, 8, requires_grad=True)
    checkpointing.checkpoint(lambda t: checkpointing.checkpoint(inner, outer(t)), x).sum().backward()
    assert sum("checkpoint forward: " in line for line in lines) >= 2
    assert sum("checkpoint recomputation: " in line for line in lines) >= 2


def test_contiguous_buffers_say_that_they_change_nothing(monkeypatch):
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
    with pytest.raises(ValueError, match="'mine' exists already"):
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
