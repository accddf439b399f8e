"""Experts that the program itself cuts over tensor-parallel ranks, and spreads over those that see other samples."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.axes import DATA, TENSOR
from deepspeed.comm.job.mesh import Mesh
from deepspeed.moe.layer import MoE
from tests.engine.support import SHARDED
from tests.harness import run_ranks

WIDTH, INNER, EXPERTS = 6, 8, 4


class _Sum(torch.autograd.Function):
    """Adds up over the tensor ranks what experts made (forward) or the gradients of what they got (backward)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, in_forward: bool) -> torch.Tensor:
        ctx.group, ctx.in_forward = group, in_forward
        x = x.clone()
        if in_forward and group is not None:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone()
        if not ctx.in_forward and ctx.group is not None:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


class CutExpert(nn.Module):
    """Half of the inner features, or all of them without a group."""

    groups: dict[str, Any] = {}  # copies of an expert share it

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.up = nn.Parameter(torch.zeros(INNER // parts, WIDTH))
        self.down = nn.Parameter(torch.zeros(WIDTH, INNER // parts))
        for parameter in (self.up, self.down):
            parameter.tensor_model_parallel = parts > 1  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = self.groups["tensor"] if self.parts > 1 else None
        x = _Sum.apply(x, group, False)
        return _Sum.apply(torch.tanh(x @ self.up.T) @ self.down.T, group, True)


class CutNet(nn.Module):
    """A linear, experts, a linear."""

    def __init__(self, ep_size: int, parts: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        options: dict[str, Any] = {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False}
        self.moe = MoE(WIDTH, CutExpert(parts), EXPERTS, ep_size, enable_expert_tensor_parallelism=parts > 1, **options)
        local = EXPERTS // ep_size
        place, part = (dist.get_rank() // 2, dist.get_rank() % 2) if parts > 1 else (0, 0)
        rows = slice(part * INNER // parts, (part + 1) * INNER // parts)
        with torch.no_grad():
            for number, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
                draws = torch.Generator().manual_seed(place % ep_size * local + number)
                up, down = (torch.randn(INNER, WIDTH, generator=draws) * 0.3 for _ in range(2))
                expert.up.copy_(up[rows])
                expert.down.copy_(down.T[:, rows])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        made, l_aux, _ = self.moe(x)
        return self.last(x + made).square().mean() + 0.1 * l_aux


def _tokens(step: int, of_data: int) -> torch.Tensor:
    return torch.randn(5 + 3 * of_data, WIDTH, generator=torch.Generator().manual_seed(10 * step + of_data))


def _reference() -> list[tuple[list[float], float]]:
    model = CutNet(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    result = []
    for step in range(4):
        optimizer.zero_grad()
        losses = [model(_tokens(step, of_data)) for of_data in range(2)]
        (sum(losses) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        result.append(([loss.item() for loss in losses], norm.item()))
    return result


def _cut(result: list[tuple[list[float], float]]) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    CutExpert.groups["tensor"] = pairs[dist.get_rank() // 2]
    mesh = Mesh(((DATA, 2), (TENSOR, 2)))
    for stage in (0, 1, 3):
        deepspeed.utils.groups.set_mesh(mesh)
        model = CutNet(2, 2)
        engine = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 0.2,
                "zero_optimization": {"stage": stage, **(SHARDED if stage == 3 else {})},
            },
            mesh_param=mesh,
        )[0]
        for step, (losses, norm) in enumerate(result):
            loss = engine(_tokens(step, dist.get_rank() // 2))
            assert loss.item() == pytest.approx(losses[dist.get_rank() // 2], abs=1e-6), f"stage {stage}, step {step}"
            engine.backward(loss)
            engine.step()
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5), f"stage {stage}, step {step}"
        engine.destroy()


def test_experts_cut_by_the_program() -> None:
    run_ranks(_cut, 4, run_ranks(_reference, 1)[0], timeout=150)
