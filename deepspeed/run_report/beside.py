"""A run beside its plan: time, memory by kind and bytes by axis."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from deepspeed.run_report.run_data import RunData

Row = tuple[Any, ...]


def time_beside_plan(run: RunData, step_seconds: float) -> list[Row]:
    """Returns ``(what, planned, run, ratio)`` of a step's time and the first rank's peak memory; empty without a plan.

    Args:
        run: The run.
        step_seconds: Of a step, the median.
    """
    rows = []
    if (bound := _number(run.plan, "step_seconds_at_least")) is not None:
        rows.append(_row("milliseconds per step, at least", bound * 1e3, step_seconds * 1e3))
    planned = _number(run.plan, "peak", "device", "bytes")
    if planned is not None and run.first.facts.get("device") != "cpu":  # there, a process has more than tensors
        found = max((line["memory"] for line in run.first.steps.values()), default=0)
        rows.append(_row("peak of device memory, bytes", planned, found))
    return rows


def memory_beside_plan(run: RunData) -> list[Row]:
    """Returns ``(kind, planned bytes, counted bytes, formula)`` of the first rank's memory between two steps."""
    rows: list[Row] = next((event["rows"] for event in reversed(run.first.events) if event["name"] == "memory"), [])
    return [(kind, planned, counted, formula) for kind, counted, planned, formula in rows]


def bytes_beside_plan(run: RunData) -> list[Row]:
    """Returns ``(axis, planned, run, ratio)`` of the bytes that the first rank sends in a step, the median."""
    lines = [run.first.steps[number] for number in sorted(run.first.steps)[1:]]
    axes = sorted({axis for line in lines for axis in line["bytes"]})
    planned: Mapping[str, Any] = (run.plan or {}).get("sent_by_axis", {})
    return [_row(axis, planned.get(axis), int(median(line["bytes"].get(axis, 0) for line in lines))) for axis in axes]


def flops_share(run: RunData, step_seconds: float) -> float | None:
    """Returns the planned operations of a step per second over the device's rate; None without a plan that has both.

    Operations that recomputation repeats count, so with it the share is that of the hardware.
    """
    flops, rate = _number(run.plan, "flops"), _number(run.plan, "device_flops")
    return flops / step_seconds / rate if flops and rate and step_seconds else None


def _row(what: str, planned: float | None, found: float) -> Row:
    return (
        (what, "", found, "")
        if planned is None
        else (what, planned, found, f"{found / planned:.3f}" if planned else "")
    )


def _number(values: Any, *path: str) -> float | None:
    for name in path:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values if isinstance(values, (int, float)) else None
