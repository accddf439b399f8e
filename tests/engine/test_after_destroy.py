"""What is left of an engine that was destroyed: what it answers while it is kept, and nothing once it is dropped."""

import gc
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

import deepspeed
from deepspeed.errors import CallOrderError
from deepspeed.linear import quantize_model
from deepspeed.moe.layer import MoE
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from tests.engine.support import SHARDED, engine_of, inputs, rank
from tests.harness import on_ranks
from tests.harness.toy_models import tower


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
