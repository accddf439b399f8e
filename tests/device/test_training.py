"""Training on the simulated device: whatever the stage and the tier, everything is ordered."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.comm.host.nodes import NativeByNodes, Nodes
from deepspeed.comm.transports.native import NativeTransport
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from tests.device.support import TIERS, batch, engine_at, evaluate, step
from tests.harness.device import simulated_device
from tests.harness.toy_models import tower

PREFETCHING = {"stage3_prefetch_bucket_size": 10_000, "stage3_max_reuse_distance": 1000}

# Stage, tier, ranks, precision, micro-batches, further keys.
CELLS: tuple[tuple[int, str, int, str, int, dict[str, Any]], ...] = (
    (0, "device", 2, "bf16", 2, {}),
    (1, "device", 2, "fp16", 1, {}),
    (1, "optimizer on the host", 2, "bf16", 2, {}),
    (2, "device", 2, "fp32", 1, {}),
    (2, "optimizer on the host", 1, "fp16", 3, {}),
    (2, "optimizer in files", 2, "bf16", 1, {}),
    (3, "device", 2, "bf16", 2, PREFETCHING),
    (3, "device", 4, "bf16", 1, {"zero_hpz_partition_size": 2}),
    (3, "device", 4, "bf16", 2, {"mics_shard_size": 2}),
    (3, "optimizer on the host", 2, "bf16", 1, {}),
    (3, "both on the host", 1, "bf16", 1, PREFETCHING),
    (3, "both on the host", 2, "fp16", 3, {}),
    (3, "both in files", 2, "bf16", 2, PREFETCHING),
)


@pytest.mark.parametrize(("stage", "tier", "ranks", "precision", "accumulation", "zero"), CELLS)
def test_training_is_ordered(
    stage: int, tier: str, ranks: int, precision: str, accumulation: int, zero: dict[str, Any], tmp_path: Path
) -> None:
    with simulated_device(ranks=ranks, quick=accumulation == 2):
        engine = engine_at(
            stage, tier, tmp_path, precision=precision, accumulation=accumulation, zero=zero, gradient_clipping=0.5
        )
        for number in range(3):
            step(engine, number)
        engine.backward(engine(batch(engine, 4)))
        evaluate(engine)
        engine.step()
        engine.destroy()


@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier != "optimizer in files"])
def test_what_a_failure_leaves_is_ordered(tier: str, tmp_path: Path) -> None:
    class Failure(Exception):
        pass

    def fail(*_: Any) -> None:
        raise Failure

    with simulated_device(ranks=2):
        engine = engine_at(3, tier, tmp_path, zero=PREFETCHING)
        step(engine)
        for register in ("register_forward_hook", "register_full_backward_hook"):
            hook = getattr(engine.module.layers[1], register)(fail)
            with pytest.raises(Failure):
                engine.backward(engine(batch(engine, 1)))
            hook.remove()
            step(engine, 2)
        engine.destroy()


@pytest.mark.parametrize("tier", ["device", "both in files"])
def test_a_model_that_was_built_sharded_is_ordered(tier: str, tmp_path: Path) -> None:
    with simulated_device(ranks=2):
        with deepspeed.zero.Init(dtype=torch.bfloat16):
            model = tower(depth=2)
        engine = engine_at(3, tier, tmp_path, model=model)
        step(engine)
        engine.destroy()


@pytest.mark.parametrize("tier", ["device", "both on the host"])
def test_gathers_that_nobody_uses_are_ordered(tier: str) -> None:
    """What was asked for ahead is on its way when a shorter forward ends; its memory is given back then."""
    with simulated_device(ranks=2):
        engine = engine_at(3, tier, zero={"stage3_prefetch_bucket_size": 10_000, "stage3_max_reuse_distance": 0})
        step(engine)
        for _ in range(2):
            evaluate(engine)
        first = engine.module.first
        engine.module.forward = lambda x: first(x.to(first.bias.dtype))
        for _ in range(2):
            evaluate(engine)
        engine.destroy()


@pytest.mark.parametrize(("stage", "tier"), [(2, "optimizer on the host"), (3, "both on the host"), (3, "device")])
def test_access_to_parameters_is_ordered(stage: int, tier: str) -> None:
    with simulated_device(ranks=2 if stage == 3 else 1):
        engine = engine_at(stage, tier)
        step(engine)
        parameters = list(engine.module.parameters())[:3]
        engine.backward(engine(batch(engine, 1)))
        for parameter in parameters:
            assert safe_get_full_grad(parameter) is not None
            safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 2)
        engine.step()
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            parameters[0].data.mul_(2)
        with deepspeed.zero.GatheredParameters(parameters):
            parameters[1].sum().item()
        evaluate(engine)
        step(engine, 2)
        engine.destroy()


@pytest.mark.parametrize("optimizer", ["Lamb", "Muon"])
def test_optimizers_that_exchange_are_ordered(optimizer: str) -> None:
    with simulated_device(ranks=2):
        engine = engine_at(3, "optimizer on the host", optimizer={"type": optimizer, "params": {"lr": 0.01}})
        for number in range(2):
            step(engine, number)
        engine.destroy()


class _Layer(nn.Module):
    """A layer whose gain is not used, beside parameters that are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 9)
        self.gain = nn.Parameter(torch.full((40,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.linear.bias.dtype)
        return x + self.linear(x)


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Layer() for _ in range(5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


@pytest.mark.parametrize(("stage", "tier"), [(1, "optimizer on the host"), (3, "both in files")])
def test_unused_parameters_keep_their_values(stage: int, tier: str, tmp_path: Path) -> None:
    """The buffers through which results go up hold those of other buckets; what was not updated is not taken."""
    with simulated_device():
        engine = engine_at(stage, tier, tmp_path, model=_Layers())
        for number in range(3):
            step(engine, number)
        gains = [layer.gain for layer in engine.module.layers]
        with deepspeed.zero.GatheredParameters(gains):
            assert all((gain == 2).all().item() for gain in gains)
        engine.destroy()


def test_gathers_in_two_steps_are_ordered() -> None:
    """Between nodes, then inside each: the second step is queued at once, on streams of its own."""
    with simulated_device(ranks=4) as device:
        flat = torch.zeros(64, device="cuda")
        flat[:16].fill_(1)
        world = device.world
        plain = world.transport(None)
        far, near = (world.transport(None, ranks) for ranks in ((0, 2), (0, 1)))
        assert isinstance(plain, NativeTransport) and isinstance(far, NativeTransport)
        assert isinstance(near, NativeTransport)
        transport = NativeByNodes(plain, Nodes(2, 2), far, near)
        for number in range(2):
            work = transport.all_gather(flat, key=number, label="a gather")
            torch.ones(64, device="cuda").add_(1)  # beside it
            work.wait()
            assert flat.sum().item() == 64
            del work
            flat.mul_(1)


def _set_local(engine: Any) -> None:
    weight = next(engine.module.parameters())
    part = safe_get_local_fp32_param(weight)
    assert part is not None
    safe_set_local_fp32_param(weight, torch.ones_like(part))


def _publish(engine: Any) -> None:
    engine.optimizer.publish_masters()


@pytest.mark.parametrize("write", [_set_local, _publish])
def test_the_host_writes_shards_after_their_reads(write: Any) -> None:
    with simulated_device(ranks=2):
        engine = engine_at(3, "both on the host", zero={"stage3_max_reuse_distance": 0})
        step(engine)
        for _ in range(2):  # the first one waits for the device, as it records the order of gathers
            evaluate(engine)
        write(engine)
        step(engine, 1)
        engine.destroy()
