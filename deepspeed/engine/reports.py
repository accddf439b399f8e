"""Reports of the engine: memory beside its formula, dtypes per param group."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.comm.job.mpu import RankCoordinates
from deepspeed.config.sections.monitor import hide_secrets
from deepspeed.config.sections.root import Root
from deepspeed.engine.batches import Batches
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.placement import Placement, Tier
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.storage import StorageKind
from deepspeed.zero.tiling.formula import MemoryFormula
from deepspeed.zero.update.updater import Updater


def memory_rows(
    runtime: ZeroRuntime, updater: Updater | None, precision: PrecisionPolicy, accumulation_steps: int
) -> list[tuple[str, int, int, str]]:
    """Returns ``(kind, counted bytes, bytes by formula, formula)`` of this rank, between two steps.

    Tensors off the device have rows of their own, whose kind ends in ``(host)`` or ``(file)``.
    """
    if updater is not None:
        updater.count_state()
    host_is_device = runtime.host_is_device
    formula = MemoryFormula(runtime.layout, runtime.placement, host_is_device=host_is_device, placed=runtime.placed)
    states = _states_per_element(updater)
    rows = [
        (StorageKind.COMPUTE, Tier.DEVICE, *formula.compute()),
        (StorageKind.MASTER, Tier.DEVICE, *formula.master()),
        (StorageKind.OPTIMIZER, Tier.DEVICE, *formula.optimizer(states)),
        (StorageKind.GRADIENT_BUCKET, Tier.DEVICE, *_kept_buckets(runtime, precision, accumulation_steps)),
        (StorageKind.GRADIENT, Tier.DEVICE, 0, "0 between steps"),
        (StorageKind.GATHERED, Tier.DEVICE, 0, "0 between steps"),
    ]
    private = [] if updater is None else updater.driver.private_formula(formula)
    if private:
        text = " + ".join(text for nbytes, text in private if nbytes) or "0"
        rows.append((StorageKind.PRIVATE, Tier.DEVICE, sum(nbytes for nbytes, _ in private), text))
    for tier in runtime.placement.tiers[1:]:
        rows.append((StorageKind.COMPUTE, tier, *formula.compute(tier)))
        rows.append((StorageKind.MASTER, tier, *formula.master(tier)))
        rows.append((StorageKind.OPTIMIZER, tier, *formula.optimizer(states, tier)))
        if tier is Tier.HOST:
            rows.append((StorageKind.GRADIENT, tier, *_landed(runtime, formula, precision, accumulation_steps)))
            rows.append((StorageKind.STAGING, tier, runtime.states.staging_bytes, "buffers x bytes of one"))
            if updater is not None and updater.speculation is not None:
                rows.append((StorageKind.SHADOW, tier, *formula.shadow(states)))
    return [
        (_named(kind, tier), runtime.memory_tracker.live(kind, tier), number, text) for kind, tier, number, text in rows
    ]


def _named(kind: StorageKind, tier: Tier) -> str:
    return kind.value if tier is Tier.DEVICE else f"{kind.value} ({tier.value})"


def _landed(
    runtime: ZeroRuntime, formula: MemoryFormula, precision: PrecisionPolicy, accumulation_steps: int
) -> tuple[int, str]:
    """Returns the host bytes kept for gradients from an accelerator (locking pages is slow), and their formula."""
    if runtime.host_is_device or runtime.reducer is None:
        return 0, "0 between steps"
    return formula.gradients(
        accumulation=accumulation_steps > 1,
        reduced=True,
        accumulate_itemsize=precision.accumulate_dtype.itemsize,
        tier=Tier.HOST,
    )


def _kept_buckets(runtime: ZeroRuntime, precision: PrecisionPolicy, accumulation_steps: int) -> tuple[int, str]:
    """Returns the bytes of packed gradients that groups of one rank keep (``GradientBucket.clear``), and a formula."""
    alone = any(bucket.num_slices == 1 for bucket in runtime.layout.buckets)
    if not alone or accumulation_steps > 1:
        return 0, "0 between steps"
    sizes = [
        gradients.bucket.layout.numel * precision.reduce_dtype(gradients.bucket.dtype).itemsize
        for gradients in (runtime.reducer.buckets if runtime.reducer is not None else [])
        if gradients.bucket.layout.num_slices == 1
    ]
    return sum(sizes), "bytes x Psi, kept from the first step on"


def _states_per_element(updater: Updater | None) -> int:
    """Returns the number of tensors that the optimizer keeps per parameter (two moments for Adam), as observed."""
    if updater is None:
        return 0
    counts = [
        sum(isinstance(value, torch.Tensor) and value.dim() > 0 for value in state.values())
        for state in updater.optimizer.state.values()
    ]
    return max(counts, default=0)


def precision_rows(
    runtime: ZeroRuntime,
    optimizer: torch.optim.Optimizer | None,
    precision: PrecisionPolicy,
    accumulation_steps: int,
) -> list[dict[str, Any]]:
    """Returns one dict per param group."""

    def sent_dtype(dtype: torch.dtype) -> torch.dtype:
        sends_sums = accumulation_steps > 1 and not runtime.placement.shard_gradients
        if sends_sums and precision.communication_dtype is None:
            return precision.accumulate_dtype
        return precision.reduce_dtype(dtype)

    rows: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else []):
        # Read from the layout, not from this rank's runs: a small group may be on other ranks only.
        members = [m for m in runtime.masters if any(t.param_group == number for t in m.bucket.layout.tiles)]
        compute = sorted({str(m.bucket.dtype) for m in members})
        assert optimizer is not None
        state = {
            str(value.dtype)
            for param in group["params"]
            for value in optimizer.state.get(param, {}).values()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        }
        masters = sorted({str(m.flat.dtype) for m in members})
        rows.append(
            {
                "param_group": number,
                "compute": compute,
                "accumulate": str(precision.accumulate_dtype),
                "reduce": sorted({str(sent_dtype(m.bucket.dtype)) for m in members}),
                "master": masters,
                "state": sorted(state) or (masters if optimizer.state else []),
            }
        )
    return rows


def state_text(
    root: Root,
    device: torch.device,
    precisions: Sequence[dict[str, Any]],
    memory: Sequence[tuple[str, int, int, str]],
) -> str:
    """Returns the text of ``dump_state``: versions, keys that differ from their defaults, dtypes and memory."""
    changed = hide_secrets(root.model_dump(exclude_defaults=True))
    settings = json.dumps(changed, indent=2, default=str)  # functions as their text
    lines = [
        f"state of the engine: torch {torch.__version__}, Python {platform.python_version()}, device {device}",
        f"configuration (keys that differ from their defaults): {settings}",
    ]
    for row in precisions:
        names = {name: value for name, value in row.items() if name != "param_group"}
        texts = [f"{name} {', '.join(v) if isinstance(v, list) else v}" for name, v in names.items()]
        lines.append(f"param group {row['param_group']}: {'; '.join(texts)}")
    lines.append("model-state memory of rank 0 (bytes now, by formula between steps, formula):")
    lines += [f"  {kind}: {counted:,}, {by_formula:,}, {formula}" for kind, counted, by_formula, formula in memory]
    return "\n".join(lines)


def summary(runtime: ZeroRuntime, placement: Placement, ranks: RankCoordinates, batches: Batches) -> str:
    """Returns what an engine logs about itself when it is made: stage, ranks, elements, batch."""
    layout = runtime.layout
    numel = sum(bucket.used_numel for bucket in layout.buckets)
    shared_by = {bucket.num_slices for bucket in layout.buckets if bucket.replicas > 1}
    groups = f" in groups of {shared_by.pop()}" if shared_by else ""
    whole, micro_batch, steps = batches.get_batch_info()
    return (
        f"ZeRO stage {placement.stage} on {ranks.zero_size} rank(s){groups}: {numel:,} parameters in "
        f"{len(layout.buckets)} bucket{'s' * (len(layout.buckets) != 1)}{_sharding(runtime, placement, numel)}; batch "
        f"{whole} = {micro_batch} x {steps} x {ranks.data_size} (micro-batch x accumulation x ranks)"
    )


def accumulation_note(
    runtime: ZeroRuntime, placement: Placement, precision: PrecisionPolicy, accumulation_steps: int
) -> str | None:
    """Returns the line on fp32 sums of 16-bit gradients, which upstream keeps in 16 bits; None where there are none."""
    compute, accumulate = precision.compute_dtype, precision.accumulate_dtype
    if accumulation_steps == 1 or compute is None or accumulate.itemsize <= compute.itemsize:
        return None
    formula = MemoryFormula(runtime.layout, placement, host_is_device=runtime.host_is_device, placed=runtime.placed)
    wide, narrow = (
        formula.gradients(accumulation=True, reduced=False, accumulate_itemsize=dtype.itemsize)[0]
        for dtype in (accumulate, compute)
    )
    if wide == narrow:
        return None
    names = {torch.float32: "fp32", torch.float64: "fp64"}
    return (
        f"gradients of {accumulation_steps} micro-batches are summed in {names[accumulate]}: {wide:,} bytes per rank, "
        f"{wide - narrow:,} more than in {precision.name}, in which upstream sums them. "
        f'data_types.grad_accum_dtype: "{precision.name}" does that too, and loses small gradients'
    )


def _sharding(runtime: ZeroRuntime, placement: Placement, numel: int) -> str:
    """Returns how many parameters are sharded between uses and, where none are, why; empty below stage 3."""
    sharded = sum(bucket.layout.used_numel for bucket in runtime.buckets if bucket.is_sharded)
    if sharded:
        return f", {'all' if sharded == numel else f'{sharded:,}'} of them sharded between uses"
    if not placement.shard_params:
        return ""
    if all(bucket.num_slices == 1 for bucket in runtime.layout.buckets):
        return ", none sharded between uses, as no other rank shares them"
    return (
        ", none sharded between uses: all are below zero_optimization.stage3_param_persistence_threshold. Lower it (0 "
        "shards everything) to save memory"
    )
