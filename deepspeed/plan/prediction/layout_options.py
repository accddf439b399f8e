"""From a configuration and options to a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.config.batch import ACCUMULATION, MICRO, TOTAL
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.configs import stage_of
from deepspeed.plan.pipeline import Pipeline
from deepspeed.plan.prediction.layout import ParallelLayout


def layout_of(
    config: Mapping[str, Any],
    ranks: int,
    *,
    pipeline: Pipeline,
    tensor: int | None = None,
    sequence: int | None = None,
    ep: int | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    **options: Any,
) -> ParallelLayout:
    """Returns the layout that a configuration means.

    Args:
        config: The ds_config as a dict.
        ranks: All of them.
        pipeline: Stages and schedule.
        tensor: Ranks that share layers; None: as the configuration says.
        sequence: Ranks that share sequences; None: as the configuration says.
        ep: Ranks that share experts; None: as the configuration says.
        micro_batch: Samples of a forward; None: as the configuration says.
        accumulation: Micro-batches of a step; None: as the configuration says.
        **options: Further fields of :class:`ParallelLayout`.

    Raises:
        DeepSpeedConfigError: The ranks or the batch cannot be divided so.
    """
    cut, share = config.get("tensor_parallel") or {}, config.get("sequence_parallel") or {}
    zero = config.get("zero_optimization") or {}
    tensor = tensor or max(int(cut.get("autotp_size") or 1), 1)
    sequence = sequence or int(config.get("sequence_parallel_size") or 1)
    model = tensor * sequence * pipeline.stages
    data, left = divmod(ranks, model)
    if left or not data:
        raise DeepSpeedConfigError(
            f"{ranks} ranks are no multiple of tensor {tensor} x sequence {sequence} x pipe {pipeline.stages}; change "
            "a degree or the number of nodes"
        )
    samples, steps = _batch(config, data, micro_batch, accumulation)
    half = any((config.get(name) or {}).get("enabled") for name in ("bf16", "fp16"))
    accumulated = (config.get("data_types") or {}).get("grad_accum_dtype")
    found: dict[str, Any] = {
        "is_ring": share.get("mode", "ulysses") != "ulysses",
        "stage": stage_of(config),
        "shard_ranks": max(int(zero.get("mics_shard_size") or 0), 0) or None,
        "is_compiled": bool(
            (config.get("compile") or {}).get("enabled") or (config.get("compile") or {}).get("deepcompile")
        ),
        "cuts_norms": tensor > 1 and bool(cut.get("sequence_parallel_norms")),
        "gradient_bytes": 4 if accumulated in ("fp32", "float32") or not half else 2,
        "offload": (zero.get("offload_optimizer") or {}).get("device", "none") != "none",
    }
    experts = ep or int((config.get("expert_parallel") or {}).get("autoep_size") or 1)
    return ParallelLayout(
        tensor=tensor,
        pipe=pipeline.stages,
        chunks=len(pipeline.stage_of) // pipeline.stages,
        schedule=pipeline.schedule,
        context=sequence,
        experts=experts,
        data=data,
        micro_batch=samples,
        accumulation=steps,
        **{**found, **{name: value for name, value in options.items() if value is not None}},
    )


def _batch(config: Mapping[str, Any], data: int, micro: int | None, steps: int | None) -> tuple[int, int]:
    total = config.get(TOTAL)
    given = config.get(MICRO)
    micro = micro or (given if isinstance(given, int) else None)
    if not isinstance(total, int):
        found = config.get(ACCUMULATION)
        return micro or 1, steps or (found if isinstance(found, int) else 1)
    if steps is not None:
        return micro or 1, steps
    micro = micro or 1
    if total % (micro * data):
        raise DeepSpeedConfigError(
            f"{TOTAL} {total} is no multiple of micro-batch {micro} x {data} ranks that share a batch; change "
            "one of them"
        )
    return micro, total // (micro * data)
