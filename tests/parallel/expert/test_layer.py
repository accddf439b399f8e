"""Layers whose experts are spread over ranks equal one process that has them all."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import deepspeed
from deepspeed.comm.job import groups
from deepspeed.comm.job.job import Job
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.moe.layer import MoE
from tests.engine.support import SHARDED, WIDTH, adamw, engine_of, rank, same_on_all_ranks
from tests.harness import on_ranks, run_ranks

EXPERTS = 4
CHECKPOINTS: dict[Any, Callable[..., Any]] = {
    "reentrant": deepspeed.checkpointing.checkpoint,
    "not reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
}


class Net(nn.Module):
    """Two expert layers between linears, of which the second may have another size."""

    def __init__(self, sizes: tuple[int, int], checkpoint: Callable[..., Any] | None = None, **options: Any) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        torch.manual_seed(5)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            MoE(WIDTH, nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)), EXPERTS, size, **options)
            for size in sizes
        )
        self.last = nn.Linear(WIDTH, 3)
        self.aux: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = []
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            y, l_aux, _ = block(x) if self.checkpoint is None else self.checkpoint(block, x)
            self.aux.append(l_aux)
            x = x + y
        return self.last(x).float().square().mean() + 0.1 * sum(self.aux)


def place_of(block: MoE) -> int:
    """This rank's place among those that share the experts of a layer."""
    if block.ep_size == 1:
        return 0
    if block.ep_size not in Job.adopt().experts.sizes():  # a declaration would keep the groups beyond their engine
        groups.declare_expert_groups(block.ep_size)
    return Job.adopt().experts.ranks_of(block.ep_size)[0].index(rank())


@torch.no_grad()
def distinguished(model: Net) -> None:
    """Experts begin with equal values: gives each its own, by its number among all."""
    for number, block in enumerate(model.blocks):
        for local, expert in enumerate(block.deepspeed_moe.experts.deepspeed_experts):
            which = place_of(block) * block.num_local_experts + local
            draws = torch.Generator().manual_seed(100 * number + which)
            for parameter in expert.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.1)


def tokens(step: int, micro: int, of_rank: int) -> torch.Tensor:
    """Another number of tokens on every rank and in every micro-batch; now and then none at all."""
    count = (3, 11, 6, 1, 0)[(2 * step + micro + of_rank) % 5] if (step, micro) != (0, 0) else 5 + of_rank
    draws = torch.Generator().manual_seed(1000 * step + 100 * micro + of_rank)
    return torch.randn(max(count, 1), WIDTH, generator=draws)


def logical(model: Net) -> dict[str, torch.Tensor]:
    """Parameters by the names that they have where all experts are."""
    found = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "deepspeed_experts" in parts:
            block = model.blocks[int(parts[1])]
            place = parts.index("deepspeed_experts") + 1
            parts[place] = str(int(parts[place]) + place_of(block) * block.num_local_experts)
        found[".".join(parts)] = parameter
    return found


def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, msg=lambda text: f"{what}: {text}")


def compare(world: int, sizes: tuple[int, int], stage: int, accumulation: int, clip: float, **more: Any) -> list[float]:
    """Four steps of an engine against plain torch in one process."""
    options, checkpoint = more.pop("options", {}), more.pop("checkpoint", None)
    zero = {**(SHARDED if stage == 3 else {}), **more.pop("zero", {})}
    for size in set(sizes) if more.get("use_data_before_expert_parallelism") else ():
        groups._create_expert_and_data_parallel(size, use_data_before_expert_parallel_=True)
    reference = Net((1, 1), **options)
    distinguished(reference)
    model = Net(sizes, CHECKPOINTS.get(checkpoint), **options)
    distinguished(model)
    optimizer = adamw(reference)
    engine = engine_of(model, stage, zero=zero, accumulation=accumulation, gradient_clipping=clip, **more)
    names = logical(model)
    norms = []
    for step in range(4):
        for micro in range(accumulation):
            torch.manual_seed(step * 10 + micro + rank() * 100)
            engine.backward(engine(tokens(step, micro, rank())))
            engine.step()
        optimizer.zero_grad()
        for micro in range(accumulation):
            for other in range(world):
                torch.manual_seed(step * 10 + micro + other * 100)
                loss = reference(tokens(step, micro, other))
                if micro == accumulation - 1 and other == rank():
                    for ours, theirs in zip(engine.module.aux, reference.aux, strict=True):
                        close(ours, theirs, f"l_aux, step {step}")
                (loss / (world * accumulation)).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip or math.inf)
        optimizer.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        norms.append(engine.get_global_grad_norm())
        wanted = dict(reference.named_parameters())
        for name, parameter in names.items():
            found = deepspeed.utils.safe_get_full_fp32_param(parameter)
            close(found, wanted[name].detach(), f"{name}, step {step}")
    engine.destroy()
    return norms


class Scaled(nn.Module):
    """Four experts of one weight each, whose gradients are 2, 4, 6 and 8 wherever they live."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.moe = MoE(1, nn.Linear(1, 1, bias=False), EXPERTS, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = place_of(self.moe) * self.moe.num_local_experts
        experts = self.moe.deepspeed_moe.experts.deepspeed_experts
        values = [expert(x * 2.0 * (first + local + 1)) for local, expert in enumerate(experts)]
        return torch.stack(values).sum() * self.moe.ep_size  # an expert gets the tokens of so many ranks


FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def _each_expert_counts_once(sizes: list[int]) -> None:
    for size in sizes:
        for stage, precision in ((0, {}), (1, FP16), (2, {"bf16": {"enabled": True}}), (3, {})):
            model = Scaled(size)
            place_of(model.moe)
            zero = SHARDED if stage == 3 else {}
            engine = engine_of(model, stage, zero=zero, gradient_clipping=1.0, **precision)
            engine.backward(engine(torch.ones(1, 1, dtype=next(model.parameters()).dtype)))
            engine.step()
            norm = engine.get_global_grad_norm()
            assert norm == pytest.approx(math.sqrt(120), rel=1e-6), f"ep {size}, stage {stage}: {norm}"
            engine.destroy()


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
CELLS: list[tuple[tuple[int, int], int, int, float, dict[str, Any]]] = [
    ((2, 2), 0, 1, 0.2, {}),
    ((2, 1), 1, 3, 0.0, {"options": {"k": 2, "top2_2nd_expert_sampling": False}}),
    ((2, 2), 2, 1, 0.2, {"options": {"k": 3, "drop_tokens": False}, "zero": OFFLOADED}),
    ((2, 2), 3, 3, 0.2, {"options": {"use_residual": True}, "checkpoint": "reentrant"}),
    ((2, 2), 3, 1, 0.2, {"options": {"use_rts": True, "capacity_factor": 0.5}, "checkpoint": "not reentrant"}),
]
ON_FOUR: list[tuple[tuple[int, int], int, int, float, dict[str, Any]]] = [
    ((2, 4), 3, 1, 0.2, {"zero": {**OFFLOADED, "offload_param": {"device": "cpu"}}}),
    ((4, 2), 2, 3, 0.2, {"use_data_before_expert_parallelism": True}),
]


def _all_cells(world: int, cells: list[Any]) -> None:
    for sizes, stage, accumulation, clip, more in cells:
        try:
            norms = compare(world, sizes, stage, accumulation, clip, **dict(more))
        except AssertionError as error:
            raise AssertionError(f"ep {sizes}, stage {stage}, accumulation {accumulation}, {more}: {error}") from None
        assert same_on_all_ranks(norms)


def test_two_ranks_equal_one_process() -> None:
    run_ranks(_all_cells, 2, 2, CELLS, timeout=200)


def test_the_norm_counts_each_expert_once_wherever_it_lives() -> None:
    """Published case: 10.954 = sqrt(20 + 100) at every expert-parallel size; 7.236 is the mean of two ranks' norms."""
    run_ranks(_each_expert_counts_once, 2, [1, 2])


@on_ranks(4, timeout=200)
def test_two_sizes_in_one_model_on_four_ranks() -> None:
    """And hpZ and MiCS are refused."""
    _each_expert_counts_once([2, 4])
    with pytest.raises(
        DeepSpeedConfigError, match="zero_optimization.zero_hpz_partition_size 2 with expert layers of ep_size 2"
    ):
        engine_of(Net((2, 1)), 3, zero={**SHARDED, "zero_hpz_partition_size": 2})
    with pytest.raises(
        DeepSpeedConfigError, match="zero_optimization.mics_shard_size 2 with expert layers of ep_size 2"
    ):
        engine_of(Net((2, 1)), 3, zero={**SHARDED, "mics_shard_size": 2})
    _all_cells(4, ON_FOUR[:1])


@pytest.mark.slow
def test_ranks_that_share_experts_far_apart() -> None:
    run_ranks(_all_cells, 4, 4, ON_FOUR[1:], timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_every_stage_and_kind_of_dropping(stage: int) -> None:
    cells = [
        ((size, size), stage, accumulation, 0.2, {"options": {"k": k, "drop_tokens": drop}})
        for size in (1, 2, 4)
        for accumulation in (1, 3)
        for k, drop in ((1, True), (3, False))
    ]
    run_ranks(_all_cells, 4, 4, cells, timeout=500)
