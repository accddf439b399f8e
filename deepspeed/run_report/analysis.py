"""Analyses the lines of a run: time by phase, slow ranks, outlying steps, and advice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from deepspeed.axes import OTHER_PARTS, ROWS
from deepspeed.run_report.failures import find_failures
from deepspeed.run_report.rank_file import OUTSIDE
from deepspeed.run_report.run_data import Line, RankRun, RunData

PHASES = ("forward", "backward", "step", "schedule", "save", "load", OUTSIDE)
SLOW = 1.1
"""A rank is slow if it computes longer than this factor times the median of the other ranks."""

OUTLYING = 3.0
"""A step is outlying if it takes longer than this factor times the median step, without saves and loads."""

_OCCASIONAL = ("save", "load")  # few steps have these phases, so the mean counts and not the median, 0

_WARM_UP = 2  # first steps, which make buffers, groups and compiled code, and do not count


@dataclass(frozen=True)
class TimeRow:
    """Time per step of computing or waiting in one phase: mean over ranks, median over steps (saves, loads: mean)."""

    phase: str  # a name of :data:`PHASES`
    axis: str  # the axis whose ranks were waited for; empty: computing, not waiting
    seconds: float  # seconds per step
    share: float  # share of the sum of all rows


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes longer than the others in one phase."""

    rank: int  # its number
    host: str
    phase: str  # a name of :data:`PHASES`
    factor: float  # relative score: its time over the median of the other ranks' times, median over steps
    share: float  # its additional time as a share of the step, median over steps


@dataclass(frozen=True)
class SlowMoment:
    """A step that took far longer than the median step."""

    step: int  # its number
    seconds: float  # its time without saves and loads, on the rank where it took longest
    factor: float  # its time over that of the median step
    rank: int  # the rank with the most additional time of computing in one phase
    phase: str  # that phase, a name of :data:`PHASES`


@dataclass(frozen=True)
class RunSummary:
    """Holds the numbers of a run's report."""

    steps: int  # number of steps of the run
    step_seconds: float  # median time of a step
    samples_per_second: float  # sum over all ranks; 0 if unknown
    tokens_per_second: float  # sum over all ranks; 0 if the inputs have no token ids
    shares: tuple[TimeRow, ...]  # where the time of a step went, largest first
    slow: tuple[SlowRank, ...]  # ranks that are slower than :data:`SLOW`, slowest first
    moments: tuple[SlowMoment, ...]  # steps that took :data:`OUTLYING` times as long as the median step, longest first
    moments_share: float  # their time beyond the median step, as a share of the time of all steps
    advice: tuple[str, ...]  # sentences on what to change, most valuable first
    unfinished: tuple[int, ...]  # ranks that did not close their file: they run, or were killed
    # failures of the latest start, causes first, with ``rank``, ``time``, ``text`` and maybe ``step``
    failures: tuple[Line, ...]


def analyse(run: RunData) -> RunSummary:
    """Analyses a run. The first two steps do not count, unless there are no others."""
    numbers = run.step_numbers
    counted = numbers[_WARM_UP:] if len(numbers) > _WARM_UP else numbers
    lines = [r.steps[number] for r in run.ranks.values() for number in counted if number in r.steps]
    seconds = median([line["seconds"] for line in lines]) if lines else 0.0
    first = [run.first.steps[number] for number in counted if number in run.first.steps]
    samples = median([line.get("batch", 0) for line in first]) if first else 0
    tokens = sum(
        median(found) for r in run.ranks.values() if (found := [r.steps[n]["tokens"] for n in counted if n in r.steps])
    )
    # Tensor ranks and stages see the same tokens.
    copies = math.prod(run.first.facts.get("axes", {}).get(name, 1) for name in OTHER_PARTS)
    shares = tuple(time_shares(lines))
    moments, moments_share = slow_moments(run, counted)
    slow = tuple(slow_ranks(run, counted))
    started = min((r.starts[-1] for r in run.ranks.values() if r.starts), default=0.0)  # the latest start
    return RunSummary(
        steps=len(numbers),
        step_seconds=seconds,
        samples_per_second=samples / seconds if seconds else 0.0,
        tokens_per_second=tokens / copies / seconds if seconds else 0.0,
        shares=shares,
        slow=slow,
        moments=tuple(moments),
        moments_share=moments_share,
        advice=tuple(advise(shares, slow)),
        unfinished=tuple(rank for rank, r in run.ranks.items() if not r.has_ended),
        failures=tuple(each for each in find_failures(run) if each["time"] >= started and not each.get("restarted")),
    )


def time_shares(lines: Iterable[Mapping[str, Any]]) -> list[TimeRow]:
    """Returns where the time of steps went, largest first, from lines of any ranks."""
    by_step: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        by_step[line["step"]].append(line)
    series: dict[tuple[str, str], list[float]] = defaultdict(list)
    for step_lines in by_step.values():
        parts: dict[tuple[str, str], float] = defaultdict(float)
        for line in step_lines:
            for phase in line["phases"]:
                parts[phase, ""] += computing(line, phase)
                for axis, waited in line["waits"].get(phase, {}).items():
                    parts[phase, axis] += waited
        for key, seconds in parts.items():
            series[key].append(seconds / len(step_lines))
    typical = {key: _typical(key[0], values, len(by_step)) for key, values in series.items()}
    total = sum(typical.values())
    found = [TimeRow(p, a, seconds, seconds / total) for (p, a), seconds in typical.items() if seconds > 0]
    return sorted(found, key=lambda share: -share.seconds)


def _typical(phase: str, values: list[float], steps: int) -> float:
    """Returns seconds per step from ``values``, those of the steps that had the phase."""
    if phase in _OCCASIONAL:
        return sum(values) / steps
    return median([*values, *[0.0] * (steps - len(values))])


def slow_moments(run: RunData, numbers: Iterable[int]) -> tuple[list[SlowMoment], float]:
    """Returns the outlying ones of these steps, longest first, and their time beyond the median as a share of all."""
    lines = {n: [(r.rank, r.steps[n]) for r in run.ranks.values() if n in r.steps] for n in numbers}

    def regular_seconds(line: Mapping[str, Any]) -> float:
        return float(line["seconds"] - sum(line["phases"].get(phase, 0.0) for phase in _OCCASIONAL))

    lengths = {n: max(regular_seconds(line) for _, line in found) for n, found in lines.items() if found}
    usual = median(lengths.values()) if lengths else 0.0
    if usual <= 0:
        return [], 0.0
    flat = [line for found in lines.values() for _, line in found]
    typical = {phase: median([computing(line, phase) for line in flat]) for phase in PHASES}
    moments = []
    for number, seconds in lengths.items():
        if seconds > OUTLYING * usual:
            _, rank, phase = max(
                (computing(line, phase) - typical[phase], rank, phase)
                for rank, line in lines[number]
                for phase in PHASES
                if phase not in _OCCASIONAL
            )
            moments.append(SlowMoment(number, seconds, seconds / usual, rank, phase))
    beyond = sum(moment.seconds - usual for moment in moments)
    return sorted(moments, key=lambda moment: -moment.seconds), beyond / sum(lengths.values())


def computing(line: Mapping[str, Any], phase: str) -> float:
    """Returns the seconds of a phase in which a rank did not wait for others."""
    return max(line["phases"].get(phase, 0.0) - sum(line["waits"].get(phase, {}).values()), 0.0)


def slow_ranks(run: RunData, numbers: Iterable[int]) -> list[SlowRank]:
    """Returns the ranks that compute longer than the others, slowest first.

    The score of a rank is its time over the median of the other ranks' times, so that two ranks suffice. Ranks of one
    pipeline stage are compared with each other.
    """
    numbers = list(numbers)
    by_stage: dict[Any, list[RankRun]] = defaultdict(list)
    for rank_run in run.ranks.values():
        by_stage[rank_run.facts.get("stage", 0)].append(rank_run)
    found = []
    for group in by_stage.values():
        for phase in PHASES:
            scores = _scores(group, phase, numbers)
            found += [
                SlowRank(r.rank, r.facts.get("host", "?"), phase, *scores[r.rank])
                for r in group
                if r.rank in scores and scores[r.rank][0] > SLOW
            ]
    return sorted(found, key=lambda slow: -slow.factor)


def _scores(group: list[RankRun], phase: str, numbers: list[int]) -> dict[int, tuple[float, float]]:
    """Returns ``factor`` and ``share`` of :class:`SlowRank` for each rank; empty if no step took time."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for number in numbers:
        times = sorted((computing(r.steps[number], phase), r.rank) for r in group if number in r.steps)
        step_seconds = max((r.steps[number]["seconds"] for r in group if number in r.steps), default=0.0)
        if len(times) < 2 or step_seconds <= 0:
            continue
        for index, (seconds, rank) in enumerate(times):
            # The median of all times but this one, without a copy: there may be thousands of ranks.
            count = len(times) - 1
            low, high = (at + (at >= index) for at in ((count - 1) // 2, count // 2))
            usual = max((times[low][0] + times[high][0]) / 2, 0.01 * step_seconds)  # less does not matter
            found[rank].append((seconds / usual, (seconds - usual) / step_seconds))
    return {rank: (median(f for f, _ in pairs), median(s for _, s in pairs)) for rank, pairs in found.items()}


def advise(shares: Iterable[TimeRow], slow: Iterable[SlowRank]) -> list[str]:
    """Returns sentences on what to change, most valuable first."""
    found: list[tuple[float, str]] = []
    worst = max(slow, key=lambda rank: rank.share, default=None)
    of_worst = 0.0 if worst is None else worst.share
    by_axis: dict[str, float] = defaultdict(float)
    for share in shares:
        if share.axis:
            by_axis[share.axis] += share.share
        elif worst is not None and worst.phase == share.phase and 2 * of_worst > share.share:
            continue  # the sentence about that rank covers this time
        elif share.share > _ADVICE_THRESHOLDS.get(share.phase, 1.0):
            found.append((share.share, f"{share.share:.0%} of the time {_PHASE_ADVICE[share.phase]}"))
    for axis, part in by_axis.items():
        if part > 0.1:
            advice = f": {_AXIS_ADVICE.get(axis, 'look at the links between these ranks')}"
            if worst is not None and 2 * of_worst > part:
                advice = f", mostly for rank {worst.rank}"
            found.append((part, f"{part:.0%} of the time is spent waiting along the axis {axis}{advice}"))
    if worst is not None:
        where = phase_name(worst.phase) if worst.phase == OUTSIDE else f"in {phase_name(worst.phase)}"
        what = "its data loading and its own code" if worst.phase == OUTSIDE else "that device"
        text = (
            f"rank {worst.rank} ({worst.host}) takes {worst.factor:.2f} times as long as the others' median {where}, "
            f"and the others wait for it: look at {what}"
        )
        found.append((worst.share, text))
    return [text for _, text in sorted(found, reverse=True)]


def phase_name(phase: str) -> str:
    """Returns the name of a phase in messages and on the page."""
    return _PHASE_NAMES.get(phase, phase)


_PHASE_NAMES = {"step": "update", "schedule": "schedule of the stage", OUTSIDE: "outside the engine"}


def mfu(run: RunData, step_seconds: float) -> float | None:
    """Returns the share of its device's rate that the operations of the first rank's model reach.

    Operations that recomputation repeats do not count. None if the rank has not counted operations.
    """
    counted = next((event for event in reversed(run.first.events) if event["name"] == "operations"), None)
    if counted is None or not step_seconds:
        return None
    operations = counted["of_update"]
    if counted["tokens"]:  # updates may have different numbers of tokens
        operations *= mean(line["tokens"] for line in run.first.steps.values()) / counted["tokens"]
    return float(operations / step_seconds / counted["device_flops"])


_ADVICE_THRESHOLDS = {OUTSIDE: 0.1, "save": 0.05, "step": 0.3}
"""Shares of the time above which phases get a sentence."""

_PHASE_ADVICE = {
    OUTSIDE: "lies between calls of the engine: data loading or the program's own code. Give the loader more workers",
    "save": "goes into saving: set checkpoint.async_save, or save less often",
    "step": "goes into the update: raise gradient_accumulation_steps, or keep the optimizer on the device",
}

_AXIS_ADVICE = {row.name: row.advice for row in ROWS if row.advice}
