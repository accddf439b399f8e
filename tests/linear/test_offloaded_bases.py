"""Frozen bases in host memory: training is what it is without, and the bytes are where configured."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.linear import LoRAConfig, OptimizedLinear, QuantizationConfig
from deepspeed.offload.host import HostMemory
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind
from deepspeed.zero.tiling.describe import describe, put_in_group
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.device import OrderError, simulated_device

WIDTH, DEPTH = 64, 4
LAYER = WIDTH * WIDTH
NOTHING: dict[str, Any] = {}


class Net(nn.Module):
    """Layers of 64 x 64, of which none needs padding, with a head that trains."""

    def __init__(self, lora: dict[str, Any], bits: int | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        quant = None if bits is None else QuantizationConfig(q_bits=bits)
        config = LoRAConfig(lora_r=3, **lora)
        self.blocks = nn.ModuleList(
            OptimizedLinear(WIDTH, WIDTH, True, config, quant, dtype=dtype) for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, 5, dtype=dtype)
        with torch.no_grad():
            for block in self.blocks:
                block.lora_weight_2.weight.normal_(std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def engine_of(model: nn.Module, stage: int, model_parameters: Any = None, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        # A bucket per layer, so that a share of the layers can stay.
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": LAYER,
            **more.pop("zero", {}),
        },
        **more,
    }
    return deepspeed.initialize(model=model, model_parameters=model_parameters, config=config)[0]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(engine: Any, steps: int = 3) -> list[torch.Tensor]:
    losses = []
    for step in range(steps):
        loss = (
            engine(batch(step, engine.global_rank).to(engine.device, engine.module.head.weight.dtype)).square().mean()
        )
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    return losses


def on_host(engine: Any) -> int:
    """Bytes of compute parameters in host memory by the memory report, compared with the formula."""
    rows = {kind: (counted, formula) for kind, counted, formula, _ in engine.memory_report()}
    for kind, (counted, formula) in rows.items():
        assert counted == formula, kind
    counted = engine._runtime.memory_tracker.live(StorageKind.COMPUTE, Tier.HOST)
    assert ("compute parameters (host)" in rows) == (counted > 0)
    return counted


def same_as_without(cases: list[tuple[int, int, int | None, float]], folder: str) -> None:
    for number, (stage, sharing, bits, ratio) in enumerate(cases):
        lora = {"base_weight_sharding": sharing}
        plain = engine_of(Net(lora, bits), stage)
        expected = train(plain)
        away = engine_of(Net({**lora, "offload": True, "offload_ratio": ratio}, bits), stage)
        found = train(away)
        case = (stage, sharing, bits, ratio)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), case
        states = dict(plain.iter_full("fp32")), dict(away.iter_full("fp32"))
        assert_states_equal(*states)
        ranks = away.world_size
        assert on_host(plain) == 0
        if bits is None:
            assert on_host(away) == (ratio or 1) * DEPTH * LAYER * 4 // ranks, case
        else:
            assert on_host(away) > 0
        # Checkpoints know nothing of tiers.
        away.save_checkpoint(folder, tag=str(number))
        again = engine_of(Net(lora, bits), stage)
        again.load_checkpoint(folder, tag=str(number))
        assert_states_equal(dict(again.iter_full("fp32")), states[0])
        x = batch(9, away.global_rank)
        assert torch.equal(again(x), away(x))
        for engine in (plain, away, again):
            engine.destroy()


def of_a_model_that_was_built_sharded() -> None:
    with deepspeed.zero.Init():
        model = Net({"offload": True})
    engine = engine_of(model, 3)
    plain = engine_of(Net(NOTHING), 3)
    assert all(torch.equal(a, b) for a, b in zip(train(plain), train(engine), strict=True))
    assert on_host(engine) == DEPTH * LAYER * 4 // 2
    engine.destroy()
    plain.destroy()


@on_ranks(2)
def test_ranks_train_as_without(folder: str) -> None:
    same_as_without([(0, 1, None, 0.5), (1, 2, 8, 0.0), (3, 1, None, 0.25)], folder)
    of_a_model_that_was_built_sharded()


def test_one_rank_trains_as_without(tmp_path: Path) -> None:
    run_ranks(same_as_without, 1, [(2, 1, None, 0.75)], str(tmp_path))


@pytest.mark.slow
def test_every_stage_trains_as_without(tmp_path: Path) -> None:
    kinds: list[tuple[int, int | None, float]] = [(1, None, 0.5), (2, 8, 0.0), (1, 4, 0.5)]
    run_ranks(same_as_without, 2, [(stage, *kind) for stage in range(4) for kind in kinds], str(tmp_path), timeout=280)


@contextmanager
def unordered() -> Iterator[None]:
    """Copies up and the collective after them are queued wherever they happen to be."""
    with mock.patch.object(HostMemory, "ordered", lambda _: nullcontext()):
        yield


@pytest.mark.parametrize(("stage", "bits", "ranks"), [(0, None, 2), (2, 8, 2), (1, None, 1)])
def test_the_copies_up_are_ordered(stage: int, bits: int | None, ranks: int) -> None:
    def run() -> None:
        model = Net({"offload": True, "offload_ratio": 0.5}, bits, torch.bfloat16)
        engine = engine_of(model, stage, bf16={"enabled": True})
        on_tier = sum(b.shard.nbytes for b in engine._runtime.buckets if b.memory.tier is Tier.HOST)
        train(engine)
        assert on_host(engine) == on_tier > 0
        engine.eval()
        with torch.no_grad():
            engine(batch(7, 0).to(engine.device, torch.bfloat16))
        engine.destroy()

    with simulated_device(ranks=ranks):
        run()
    if ranks > 1:  # alone, a copy is all that a gather is
        with pytest.raises(OrderError), simulated_device(ranks=ranks), unordered():
            run()


def test_the_first_layers_leave_and_can_come_back() -> None:
    with simulated_device():
        model = Net({"offload": True, "offload_ratio": 0.3})
        values = {f"blocks.{i}.weight": block.weight.detach().clone() for i, block in enumerate(model.blocks)}
        engine = engine_of(model, 0, model_parameters=list(model.parameters()))
        groups = [describe("", block.weight).group for block in model.blocks]
        assert groups == ["offloaded base", "offloaded base", "data", "data"]  # half of the layers reach 0.3
        for block in model.blocks:
            block.weight.requires_grad_(True)
        with pytest.raises(DeepSpeedConfigError, match=r"below stage 3.*before initialize"):
            train(engine)
        engine = engine_of(model, 0)
        kept = dict(engine.iter_full("fp32"))
        assert_states_equal({name: kept[name] for name in values}, values)
        train(engine)
        assert on_host(engine) == 0
        engine.destroy()


def test_what_cannot_leave_is_refused() -> None:
    with simulated_device():
        model = Net({"offload_ratio": 0.5})
        put_in_group([model.blocks[1].weight], "ep_size_2")
        with pytest.raises(DeepSpeedConfigError, match=r"blocks.1.weight.*belongs to an expert"):
            engine_of(model, 0)
        model = Net({"offload": True})
        model.blocks[2].weight.tensor_model_parallel = True
        with pytest.raises(DeepSpeedConfigError, match=r"blocks.2.weight.*cut by tensor parallelism"):
            engine_of(model, 1)
    words = "mics_shard_size 2 with the parameters of 'offloaded base'"
    with simulated_device(ranks=4), pytest.raises(DeepSpeedConfigError, match=words):
        engine_of(Net({"offload": True}), 3, zero={"mics_shard_size": 2})
