"""Engines one after the other, beside each other, destroyed, and as users run them."""

import gc
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _world
from torch.utils.data import DataLoader, TensorDataset

import deepspeed
from deepspeed.accelerator.cpu import keep_freed_memory
from deepspeed.comm.host.message_queue import MessageQueue
from deepspeed.comm.job.job import Job
from deepspeed.engine import initialize
from deepspeed.errors import CallOrderError
from deepspeed.linear import quantize_model
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.engine.support import SHARDED, WIDTH, adamw, engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.cases import Plain
from tests.harness.event_loops import LIBRARY
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters

# What is left of an engine that was destroyed: what it answers while it is kept, and nothing once it is dropped.


class _KeepsItsLoss(torch.nn.Module):
    """As many models do: the tensor's graph keeps the parameters, where no collector sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        expert = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        self.experts = MoE(8, expert, num_experts=4, ep_size=2, k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, self.balance, _ = self.experts(self.first(x))
        return y.sum() + self.balance


def _trained_and_destroyed(stage: int) -> tuple[weakref.ref[torch.nn.Module], tuple[int, int, int]]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    model = _KeepsItsLoss()
    engine = deepspeed.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 8)))
        engine.step()
    engine.destroy()
    held = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(_world.pg_map))
    return weakref.ref(model), held


@on_ranks(2)
def test_engines_one_after_the_other_leave_nothing_behind() -> None:
    for stage in (1, 2, 3):
        held = []
        for _ in range(3):
            model, now = _trained_and_destroyed(stage)
            gc.collect()
            assert model() is None, stage
            held.append(now)
        # Descriptors, threads and process groups of the second one serve the third.
        assert held[1] == held[2], (stage, dist.get_rank(), held)


@on_ranks(2)
def test_a_destroyed_engine_can_still_be_read() -> None:
    """A destroyed engine that is kept tells its states, and of a second engine on its model."""
    for stage in (0, 1, 2, 3):
        model = tower()
        engine = engine_of(model, stage)
        engine.backward(engine(inputs(0, rank())))
        engine.step()
        first = model.first.weight
        master, average = safe_get_full_fp32_param(first), safe_get_full_optimizer_state(first, "exp_avg")
        engine.destroy()
        gc.collect()
        assert torch.equal(safe_get_full_fp32_param(first), master), stage
        assert torch.equal(safe_get_full_optimizer_state(first, "exp_avg"), average)
        safe_set_full_fp32_param(first, master + 1)
        assert torch.equal(safe_get_full_fp32_param(first), master + 1)
        again = engine_of(model, stage)
        assert torch.equal(safe_get_full_fp32_param(first), master + 1), stage
        with pytest.raises(CallOrderError, match=r"another deepspeed.initialize"):
            engine(inputs(1, rank()))
        again.backward(again(inputs(1, rank())))
        again.step()
        assert again.global_steps == 1
        again.destroy()


@on_ranks(1)
def test_a_destroyed_engine_that_is_gone_is_named() -> None:
    for stage in (0, 2):
        model = tower()
        engine = engine_of(model, stage)
        engine.backward(engine(inputs(0)))
        engine.step()
        engine.destroy()
        quantized = quantize_model(model, bits=8)  # it is an ordinary model again, also while the engine is kept
        assert quantized.layers
        model = tower()
        engine = engine_of(model, stage)
        engine.destroy()
        del engine
        gc.collect()
        parameter = model.first.weight
        assert safe_get_full_fp32_param(parameter) is None
        with pytest.raises(CallOrderError, match="its engine was destroyed"):
            safe_set_full_fp32_param(parameter, torch.zeros_like(parameter))
        with pytest.raises(CallOrderError, match="its engine was destroyed"):
            safe_set_full_optimizer_state(parameter, torch.zeros_like(parameter), "exp_avg")


@on_ranks(2)
def test_a_graph_keeps_no_shard_that_it_has_not_gone_through() -> None:
    """What a graph has gone through stays with it, but not what it never came to."""
    model = tower()
    engine = engine_of(model, 3, zero=SHARDED)
    kept: list[torch.Tensor] = []
    model.layers[0].register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    engine(inputs(0, rank()))
    buckets = [(bucket.label, weakref.ref(bucket)) for bucket in engine._runtime.buckets]
    engine.destroy()
    with pytest.raises(CallOrderError, match=r"nothing gathers them any more"):
        kept[0].sum().backward()
    del engine, model
    gc.collect()
    left = [label for label, bucket in buckets if bucket() is not None]
    assert left, "the graph's own"
    assert all("first" in label or "layers.0" in label for label in left), left


# An engine that nobody refers to is freed with everything below it: memory, threads, sockets of its process group.


def _use_and_drop(stage):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, _, _, _ = initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
    dropped = [weakref.ref(engine), weakref.ref(engine.optimizer), weakref.ref(model)]
    del engine, model
    gc.collect()
    return [reference() is None for reference in dropped]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_nothing_is_left(stage):
    for ranks in (1, 2):
        assert run_ranks(_use_and_drop, ranks, stage) == [[True, True, True]] * ranks


def _watching_threads(most):
    """Returns how many there are, once there are at most ``most`` or a minute is over."""
    deadline = time.monotonic() + 60
    while (found := sum(thread.name == "deepspeed-watch" for thread in threading.enumerate())) > most:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)  # a watching thread ends after its pause
    return found


def test_watching_threads_end_with_their_group():
    for _ in range(4):
        run_ranks(_use_and_drop, 2, 3)
    assert run_ranks(_watching_threads, 2, 0) == [0, 0]


# What an engine must not leave behind, and what a user may not do to a parameter in a flat buffer.


class Returning(nn.Module):
    """Returns one of its parameters beside the loss, as models with a learnt temperature do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x).square().mean(), self.scale


@on_ranks(1)
def test_an_engine_leaves_nothing_behind() -> None:
    for _ in range(2):
        engine = engine_of(tower(), 1, disable_python_gc=True)
        assert not gc.isenabled()
        engine.destroy()
        engine.destroy()
        assert gc.isenabled()
    engine = engine_of(tower(), 1)
    closed = []
    engine._runtime.drop_open_work = lambda **_: closed.append("work") or 1 / 0
    engine._parts.tiers.close = lambda: closed.append("tiers")
    with pytest.raises(ZeroDivisionError):
        engine.destroy()
    assert closed == ["work", "tiers"]
    engine = engine_of(Returning(), 1)
    for step in range(3):
        loss, scale = engine(inputs(step))
        (loss * scale).backward()  # the user's own
        engine.step()
    assert engine.global_steps == 3
    assert not engine.module.scale._backward_hooks, "one for each forward"
    engine.destroy()
    engine = engine_of(tower(), 1)
    engine.module.last.bias.data = torch.ones(1)
    engine.backward(engine(inputs(0)))
    with pytest.raises(CallOrderError, match=r"'last.bias' was given the shape \(1,\)"):
        engine.step()
    engine.destroy()
    engine = engine_of(tower(), 1)
    for step, dtype in enumerate((torch.float64, torch.float32)):  # a gradient of the present dtype is shown
        engine.module.to(dtype)
        engine.backward(engine(inputs(step).to(dtype)))
        assert engine.module.last.bias.grad.dtype == dtype
        engine.step()


class Halves(nn.Module):
    """The second half gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).square().mean()


@on_ranks(2)
def test_a_gradient_set_by_the_user_counts_also_where_backward_gave_none() -> None:
    for stage in (0, 1, 3):
        engine = engine_of(Halves(), stage, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0))
        engine.backward(engine(inputs(0)))
        weight, bias = engine.module.unused.weight, engine.module.unused.bias
        before = [safe_get_full_fp32_param(parameter) for parameter in (weight, bias)]
        safe_set_full_grad(weight, torch.ones(WIDTH, WIDTH))
        engine.step()
        after = [safe_get_full_fp32_param(parameter) for parameter in (weight, bias)]
        assert torch.equal(after[0], before[0] - 1.0) and torch.equal(after[1], before[1])
        engine.destroy()


# Several engines in one process, as for a generator and a discriminator: each trains as it would alone.


def _alone(stage, seed):
    engine = engine_of(tower(seed=seed), stage)
    for step in range(3):
        engine.backward(engine(inputs(step, seed, rank())))
        engine.step()
    return full_masters(engine)


@pytest.mark.parametrize("stages", [(3, 3), (0, 3, 2), (1, 1)], ids=str)
@on_ranks(2)
def test_interleaved(stages):
    expected = [_alone(stage, seed) for seed, stage in enumerate(stages)]
    engines = [engine_of(tower(seed=seed), stage) for seed, stage in enumerate(stages)]
    for step in range(3):
        losses = [engine(inputs(step, seed, rank())) for seed, engine in enumerate(engines)]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in reversed(engines):
            engine.step()
    for engine, wanted in zip(engines, expected, strict=True):
        assert_states_equal(full_masters(engine), wanted)


@on_ranks(2)
def test_one_loss_through_two_engines():
    """One loss through two engines: both see the backward, through whichever it was called."""
    engines = [engine_of(tower(seed=seed), 3) for seed in range(2)]
    plain = Plain(lambda: nn.ModuleList(tower(seed=seed) for seed in range(2)), ranks=1)
    for step in range(3):
        x = inputs(step)
        (engines[0](x) * engines[1](x)).backward()
        for engine in engines:
            engine.step()
        plain.step(lambda models, _, x=x: models[0](x) * models[1](x))
    for engine, model in zip(engines, plain.model, strict=True):
        assert_states_equal(full_masters(engine), dict(model.named_parameters()), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_model_is_wrapped_again():
    """A destroyed engine leaves nothing behind on the model: it can be wrapped again."""
    model = tower()
    first = engine_of(model, 1)
    first.backward(first(inputs(0, rank())))
    first.step()
    after_one = full_masters(first)
    first.destroy()
    first.destroy()
    loss = first(inputs(1, rank()))
    for call, refused in {"backward": lambda: first.backward(loss), "step": first.step}.items():
        with pytest.raises(CallOrderError, match=rf"engine.{call}: this engine was destroyed"):
            refused()  # it trained each rank by itself
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    second = engine_of(model, 3, zero=SHARDED)
    assert_states_equal(full_masters(second), after_one)
    second.backward(second(inputs(1, rank())))
    second.step()
    assert second.global_steps == 1


@on_ranks(2)
def test_a_frozen_teacher():
    """An engine without optimizer at stage 3 beside one that learns from it."""
    teacher, wise = engine_of(tower(seed=8), 3, optimizer=None), tower(seed=8)
    student, plain = engine_of(tower(), 3), Plain(tower)
    for step in range(3):
        x = inputs(step)
        with torch.no_grad():
            goal = teacher(x)
        student.backward((student(x) - goal).square())
        student.step()
        plain.step(lambda model, _, x=x: (model(x) - wise(x).detach()).square())
    plain.assert_masters(student)
    assert all(tuple(p.shape) == (0,) for p in teacher.module.parameters())


# Engines come and go, save beside training, and load by processes of their own, while ranks hold connections.


def _config(stage: int, count: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }


def _trained(stage: int) -> None:
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=_config(stage))[0]
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    engine.destroy()


def _piped() -> None:
    module = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=nn.functional.mse_loss)
    engine = deepspeed.initialize(model=module, config=_config(0, 2))[0]
    engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))] * 2))
    engine.destroy()


@on_ranks(2, fresh=True)
def test_engines_come_and_go() -> None:
    files, threads = [], []
    for number in range(50):
        _piped() if number % 3 == 2 else _trained((0, 3)[number % 3])
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
        threads.append(len(os.listdir("/proc/self/task")))
    counts = files, threads
    for count in counts:
        assert max(count[40:]) <= max(count[10:20]), counts


@on_ranks(2, fresh=True)
def test_saves_beside_training_and_loaders_leave_it_alone(folder: str) -> None:
    """Which threads use mail while a checkpoint is written beside training, from a loader with processes of its own."""
    used = set()
    for name in ("post", "take"):
        plain = getattr(MessageQueue, name)

        def noting(self: MessageQueue, *given: Any, _plain: Any = plain) -> None:
            used.add(threading.current_thread().name)
            _plain(self, *given)

        setattr(MessageQueue, name, noting)
    torch.manual_seed(dist.get_rank())
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=_config(2))[0]
    assert Job.adopt().watched.of(None).queue is not None
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for _ in range(3):
        for number, (batch,) in enumerate(loader):
            engine.backward(engine(batch).square().mean())
            engine.step()
            if number in (1, 5):
                engine.save_checkpoint(folder, async_save=True)
    engine.wait_for_checkpoint()
    engine.load_checkpoint(folder)
    assert used == {"MainThread"}


# Training in interpreters without anything that the tests preload: gloo's event loops and malloc as users have them.
#
# Elsewhere in the tests a library lets the event loops wait for locks (``tests/harness/event_loops.py``), which changes
# the order in which messages arrive, and its ``LD_PRELOAD`` leaves malloc's settings alone.


STEPS = 6


def _losses(stage: int) -> list[float]:
    """Returns the mean loss of each step."""
    engine, found = engine_of(tower(), stage), []
    for step in range(STEPS):
        loss = engine(inputs(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(total.item() / dist.get_world_size())
    engine.destroy()
    return found


def _plain(ranks: int) -> list[float]:
    model = tower()
    optimizer, found = adamw(model), []
    for step in range(STEPS):
        loss = torch.stack([model(inputs(step, rank)) for rank in range(ranks)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@on_ranks(3, fresh="interpreter")
def test_training_without_the_preloaded_library_is_as_in_plain_torch() -> None:
    expected = _plain(3)
    assert "LD_PRELOAD" not in os.environ
    if sys.platform == "linux":
        assert LIBRARY not in Path("/proc/self/maps").read_text() and keep_freed_memory()
    by_stage = {stage: _losses(stage) for stage in range(4)}
    for stage, losses in by_stage.items():
        assert losses == pytest.approx(expected, rel=1e-4), stage
