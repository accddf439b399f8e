"""Many plans at once: world sizes, stages, offload, micro-batches and degrees, as a table and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from rich.table import Table
from rich.text import Text

from deepspeed.accelerator.devices import in_words
from deepspeed.config.batch import ACCUMULATION, MICRO, TOTAL
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.plan.configs import changed, number_in, stage_of
from deepspeed.plan.degrees import DEGREES, at_degrees
from deepspeed.plan.limits import check_count
from deepspeed.plan.longest import longest_sequence
from deepspeed.plan.planner import make_plan
from deepspeed.plan.result import MUCH_IDLE, Plan, Request
from deepspeed.plan.show import as_text, seconds_in_words

AXES = ("world", "stage", "offload", "micro_batch", "accumulation", "checkpointing", *DEGREES)
_OFFLOADS = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class Point:
    """One combination of values in a sweep."""

    place: dict[str, Any]  # axis to value
    plan: Plan | None
    refusal: str = ""  # why there is no plan; empty otherwise


def read_axes(entries: Sequence[str]) -> dict[str, list[Any]]:
    """Returns the axes from ``name=value,value`` entries; raises DeepSpeedConfigError where one is unknown."""
    axes: dict[str, list[Any]] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not equals or name not in AXES or not text:
            raise DeepSpeedConfigError(
                f"--sweep {entry!r}: expected one of {', '.join(AXES)}, '=', and values with commas, such as "
                "world=8,64 stage=2,3 offload=none,cpu,nvme checkpointing=off,on pipe=1,2 tensor=1,2"
            )
        if name in axes:
            raise DeepSpeedConfigError(f"--sweep {name}: given twice; write all its values with commas, {name}=1,2")
        axes[name] = [_value(name, value) for value in dict.fromkeys(text.split(","))]
    return axes


def _value(name: str, text: str) -> Any:
    if name == "offload":
        if text not in _OFFLOADS:
            raise DeepSpeedConfigError(f"--sweep offload={text}: expected {', '.join(_OFFLOADS)}")
        return text
    if name == "checkpointing":
        if text not in ("on", "off"):
            raise DeepSpeedConfigError(f"--sweep checkpointing={text}: expected on or off")
        return text == "on"
    try:
        number = int(text)
    except ValueError:
        number = -1
    least = 0 if name == "stage" else 1
    if number < least or (name == "stage" and number > 3):
        limits = "0, 1, 2 or 3" if name == "stage" else "a whole number above 0"
        raise DeepSpeedConfigError(f"--sweep {name}={text}: expected {limits}")
    check_count(name, number, f"--sweep {name}={text}", least)
    return number


def sweep(request: Request, axes: dict[str, list[Any]], *, longest: bool = False) -> Iterator[Point]:
    """Plans every combination of the axes' values; ``longest``: with the longest ``tokens`` that fit.

    Combinations that the engine rejects become points with its message. A world size is divided into nodes of the
    request's size.
    """
    for values in product(*axes.values()):
        place = dict(zip(axes, values, strict=True))
        try:
            here = _at(request, place)
            made = longest_sequence(here) if longest else make_plan(here, compare=False)
            yield Point({**place, "tokens": made.request.sequence_length} if longest else place, made)
        except DeepSpeedError as error:
            yield Point({**place, "tokens": ""} if longest else place, None, str(error))


def _at(request: Request, place: dict[str, Any]) -> Request:
    config = dict(request.config)
    if all(number_in(config, name) is not None for name in (TOTAL, MICRO, ACCUMULATION)):
        config.pop(TOTAL)  # valid for one world size only
    if "stage" in place:
        config = changed(config, stage=place["stage"])
    if "offload" in place:
        config = changed(config, **_offload(config, place["offload"]))
    machine = request.machine
    if "world" in place:
        world = place["world"]
        devices = min(machine.devices_per_node, world)
        if world % devices:
            raise DeepSpeedConfigError(
                f"--sweep world={world}: expected a multiple of {devices} devices per node (--devices)"
            )
        machine = replace(machine, nodes=world // devices, devices_per_node=devices)
    request = replace(
        request,
        config=config,
        machine=machine,
        micro_batch=place.get("micro_batch", request.micro_batch),
        accumulation=place.get("accumulation", request.accumulation),
        checkpointing=place.get("checkpointing", request.checkpointing),
    )
    return at_degrees(request, **{axis: place[axis] for axis in DEGREES if axis in place})


def _offload(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Returns the offload of optimizer states, and at stage 3 of the parameters too, to ``device``."""
    if device == "none":
        return {"offload_optimizer": None, "offload_param": None}
    zero = config.get("zero_optimization") or {}
    entry: dict[str, Any] = {"device": device}
    if device == "nvme":
        entry["nvme_path"] = (zero.get("offload_optimizer") or {}).get("nvme_path") or "/local_nvme"
    keys: dict[str, Any] = {"offload_optimizer": {**(zero.get("offload_optimizer") or {}), **entry}}
    if stage_of(config) == 3:
        keys["offload_param"] = {**(zero.get("offload_param") or {}), **entry}
    return keys


def sweep_text(points: Sequence[Point], width: int = 110) -> str:
    """Returns the table of a sweep, whose steps are not compared: their batches differ. ``*``: :func:`frontier`."""
    axes = list(points[0].place) if points else []
    rows, refusals = [], []
    best = frontier(points)
    for point in points:
        place = [_words(value) for value in point.place.values()]
        if point.plan is None:
            shown = ", ".join(f"{key}={_words(value)}" for key, value in point.place.items() if value != "")
            refusals.append(f"{shown}: {point.refusal}")
            rows.append([*place, "refused", *[""] * 5, f"({len(refusals)})"])
            continue
        plan = point.plan
        rows.append(
            [
                *place,
                "yes" if plan.fits else "no",
                in_words(plan.device_bytes),
                in_words(plan.host_bytes) if plan.host_bytes else "",
                in_words(plan.nvme_bytes) if plan.nvme_bytes else "",
                "" if plan.step_seconds is None else seconds_in_words(plan.step_seconds),
                "" if plan.tokens_per_second is None else f"{plan.tokens_per_second:,.0f}",
                "*" if point in best else "",
            ]
        )
    headings = (*axes, "fits", "device", "host per node", "files per node", "step at least", "tokens/s at most", "")
    used = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    table = Table(title="Sweep, per device and node", title_justify="left")
    for column in used:
        table.add_column(headings[column], justify="left" if headings[column] in ("fits", "") else "right")
    for row in rows:
        table.add_row(*(row[column] for column in used))
    notes = [Text(f"({number}) {sentence}") for number, sentence in enumerate(refusals, 1)]
    waiting = [point.plan for point in points if point.plan is not None and point.plan.better_accumulation is not None]
    if waiting:
        most = max(waiting, key=lambda plan: plan.idle.share if plan.idle is not None else 0.0)
        assert most.better_accumulation is not None and most.idle is not None
        notes.append(
            Text(
                f"Pipelines: in {len(waiting)} combination(s) the stages wait for each other more than "
                f"{MUCH_IDLE:.0%} of the time that they compute, {most.idle.share:.0%} at most. More micro-batches per "
                f"step help: --accumulation {most.better_accumulation[0]}, or the axis accumulation=1,8,32."
            )
        )
    return as_text([table, *notes], width)


def _words(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


_SAME_MEMORY = 0.05
"""Share of a device's usable memory: a smaller saving is not worth tokens per second."""


def frontier(points: Sequence[Point]) -> list[Point]:
    """Returns the points that fit and that no other of the same world size beats.

    A point beats another if it trains more tokens per second and needs no more device memory, with a tolerance of a
    twentieth of what is usable; at equally many tokens per second, the one that needs less memory beats the other.
    """
    fitting = [point.plan for point in points if point.plan is not None and point.plan.fits]

    def beats(one: Plan, other: Plan) -> bool:
        if one.machine.ranks != other.machine.ranks:
            return False
        mine, its = (
            (one.tokens_per_second or 0.0, -one.device_bytes),
            (other.tokens_per_second or 0.0, -other.device_bytes),
        )
        return mine > its and one.device_bytes <= other.device_bytes + _SAME_MEMORY * other.machine.usable

    return [
        point
        for point in points
        if point.plan is not None and point.plan.fits and not any(beats(other, point.plan) for other in fitting)
    ]
