"""What the engine can say about itself: memory beside its formula, dtypes per param group."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.formula import MemoryFormula
from deepspeed.zero.optimizer import DeepSpeedZeroOptimizer
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.storage import Kind


def memory_rows(
    runtime: ZeroRuntime, optimizer: DeepSpeedZeroOptimizer | None, precision: PrecisionPolicy, accumulation_steps: int
) -> list[tuple[str, int, int, str]]:
    """``(kind, counted bytes, bytes by formula, formula)`` of this rank, between two steps."""
    if optimizer is not None:
        optimizer.count_state()
    formula = MemoryFormula(runtime.layout, runtime.placement)
    states = _states_per_element(optimizer)
    rows = [
        (Kind.COMPUTE, *formula.compute()),
        (Kind.MASTER, *formula.master()),
        (Kind.OPTIMIZER, *formula.optimizer(states)),
        (Kind.GRADIENT_BUCKET, *_kept_buckets(runtime, precision, accumulation_steps)),
        (Kind.GRADIENT, 0, "0 between steps"),
        (Kind.GATHERED, 0, "0 between steps"),
    ]
    return [(kind.value, runtime.ledger.live(kind), expected, text) for kind, expected, text in rows]


def _kept_buckets(runtime: ZeroRuntime, precision: PrecisionPolicy, accumulation_steps: int) -> tuple[int, str]:
    """A group of one keeps its packed gradients allocated (see ``GradientBucket.clear``)."""
    if runtime.layout.world_size > 1 or accumulation_steps > 1:
        return 0, "0 between steps"
    sizes = [
        gradients.bucket.layout.numel * precision.reduce_dtype(gradients.bucket.dtype).itemsize
        for gradients in (runtime.reducer.buckets if runtime.reducer is not None else [])
    ]
    return sum(sizes), "bytes x Psi, kept from the first step on"


def _states_per_element(optimizer: DeepSpeedZeroOptimizer | None) -> int:
    """Tensors that the optimizer keeps per parameter (two moments for Adam), as observed."""
    if optimizer is None:
        return 0
    counts = [
        sum(isinstance(value, torch.Tensor) and value.dim() > 0 for value in state.values())
        for state in optimizer.state.values()
    ]
    return max(counts, default=0)


def precision_rows(
    runtime: ZeroRuntime, optimizer: torch.optim.Optimizer | None, precision: PrecisionPolicy
) -> list[dict[str, Any]]:
    """One dict per param group."""
    rows: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else []):
        members = [m for m in runtime.masters if any(run.span.param_group == number for run in m.runs)]
        compute = sorted({str(m.bucket.dtype) for m in members})
        assert optimizer is not None
        state = {
            str(value.dtype)
            for param in group["params"]
            for value in optimizer.state.get(param, {}).values()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        }
        rows.append(
            {
                "param_group": number,
                "compute": compute,
                "accumulate": str(precision.accumulate_dtype),
                "reduce": sorted({str(precision.reduce_dtype(m.bucket.dtype)) for m in members}),
                "master": sorted({str(m.flat.dtype) for m in members}),
                "state": sorted(state),
            }
        )
    return rows
