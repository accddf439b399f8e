"""Analyses the lines of a run: time by phase, slow ranks, and what to change first."""

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
"""A rank is slow if it computes that many times as long as the median of the other ranks."""

OUTLYING = 3.0
"""A step is a moment of its own if it takes that many times as long as the median step, saves and loads aside."""

_NOW_AND_THEN = ("save", "load")  # phases of few steps: their median is 0, their mean is what they cost

_WARM_UP = 2  # steps that are left out of times: the first ones make buffers, groups and compiled code


@dataclass(frozen=True)
class TimeRow:
    """Seconds per step that went into one thing: the mean over ranks, the median over steps (saves, loads: the mean).

    Attributes:
        phase: A name of :data:`PHASES`.
        axis: Ranks that were waited for; empty: computing, not waiting.
        seconds: Per step.
        share: Share of the sum of all rows.
    """

    phase: str
    axis: str
    seconds: float
    share: float


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes longer than the others in one phase.

    Attributes:
        rank: Its number.
        host: Its host.
        phase: A name of :data:`PHASES`.
        factor: Relative score: times as long as the median of the other ranks, the median over steps.
        share: What the rank takes longer, as a share of the step.
    """

    rank: int
    host: str
    phase: str
    factor: float
    share: float


@dataclass(frozen=True)
class SlowMoment:
    """A step that took far longer than the median step.

    Attributes:
        step: Its number.
        seconds: On the rank where it took longest, without saves and loads.
        factor: Times as long as the median step.
        rank: The rank that computed longest.
        phase: Where that rank spent most of the additional time; a name of :data:`PHASES`.
    """

    step: int
    seconds: float
    factor: float
    rank: int
    phase: str


@dataclass(frozen=True)
class RunSummary:
    """Holds the numbers of a run's report.

    Attributes:
        steps: Steps of the run.
        step_seconds: Median time of a step.
        samples_per_second: Over all ranks; 0 where unknown.
        tokens_per_second: Over all ranks; 0 where the inputs hold no token ids.
        shares: Where the time of a step went, largest first.
        slow: Ranks that are slower than :data:`SLOW`, slowest first.
        moments: Steps that took :data:`OUTLYING` times as long as the median step, longest first.
        moments_share: Share of all steps' time that these took beyond the median step.
        advice: What to change first, a sentence each, most valuable first.
        unfinished: Ranks that wrote no end: they run, or were killed.
        failures: What ended the latest start of the program, first cause first: ``rank``, ``time``, ``text``, ``step``.
    """

    steps: int
    step_seconds: float
    samples_per_second: float
    tokens_per_second: float
    shares: tuple[TimeRow, ...]
    slow: tuple[SlowRank, ...]
    moments: tuple[SlowMoment, ...]
    moments_share: float
    advice: tuple[str, ...]
    unfinished: tuple[int, ...]
    failures: tuple[Line, ...]


def analyse(run: RunData) -> RunSummary:
    """Analyses a run; steps after the first two count, if there are more."""
    numbers = run.step_numbers
    counted = numbers[_WARM_UP:] if len(numbers) > _WARM_UP else numbers
    lines = [r.steps[number] for r in run.ranks.values() for number in counted if number in r.steps]
    seconds = median([line["seconds"] for line in lines]) if lines else 0.0
    first = [run.first.steps[number] for number in counted if number in run.first.steps]
    samples = median([line.get("batch", 0) for line in first]) if first else 0
    tokens = sum(
        median(found) for r in run.ranks.values() if (found := [r.steps[n]["tokens"] for n in counted if n in r.steps])
    )
    shares = tuple(time_shares(lines))
    moments, moments_share = slow_moments(run, counted)
    slow = tuple(slow_ranks(run, counted))
    return RunSummary(
        steps=len(numbers),
        step_seconds=seconds,
        samples_per_second=samples / seconds if seconds else 0.0,
        tokens_per_second=_copies_out(run, tokens) / seconds if seconds else 0.0,
        shares=shares,
        slow=slow,
        moments=tuple(moments),
        moments_share=moments_share,
        advice=tuple(advise(shares, slow)),
        unfinished=tuple(rank for rank, r in run.ranks.items() if not r.has_ended),
        failures=tuple(_latest_failures(run)),
    )


def _latest_failures(run: RunData) -> list[Line]:
    """Returns the failures after the latest start of the program."""
    started = min((r.starts[-1] for r in run.ranks.values() if r.starts), default=0.0)
    return [failure for failure in find_failures(run) if failure["time"] >= started and not failure.get("restarted")]


def _copies_out(run: RunData, tokens: float) -> float:
    """Counts tokens once that tensor ranks and stages see in common."""
    axes = run.first.facts.get("axes", {})
    return tokens / math.prod(axes.get(name, 1) for name in OTHER_PARTS)


def time_shares(lines: Iterable[Mapping[str, Any]]) -> list[TimeRow]:
    """Returns where the time of steps went, largest first.

    Args:
        lines: Steps of any ranks.
    """
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
    whole = sum(typical.values())
    found = [TimeRow(p, a, seconds, seconds / whole) for (p, a), seconds in typical.items() if seconds > 0]
    return sorted(found, key=lambda share: -share.seconds)


def _typical(phase: str, values: list[float], steps: int) -> float:
    """Returns seconds per step; ``values`` are of the steps that had the phase."""
    if phase in _NOW_AND_THEN:
        return sum(values) / steps
    return median([*values, *[0.0] * (steps - len(values))])


def slow_moments(run: RunData, numbers: Iterable[int]) -> tuple[list[SlowMoment], float]:
    """Returns the outlying steps, longest first, and what they took beyond the median step, as a share of all time.

    Args:
        run: The run.
        numbers: Steps that count.
    """
    lines = {n: [(r.rank, r.steps[n]) for r in run.ranks.values() if n in r.steps] for n in numbers}
    lengths = {n: max(_regular_seconds(line) for _, line in found) for n, found in lines.items() if found}
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
                if phase not in _NOW_AND_THEN
            )
            moments.append(SlowMoment(number, seconds, seconds / usual, rank, phase))
    beyond = sum(moment.seconds - usual for moment in moments)
    return sorted(moments, key=lambda moment: -moment.seconds), beyond / sum(lengths.values())


def _regular_seconds(line: Mapping[str, Any]) -> float:
    """Returns the seconds of a step without its saves and loads."""
    return float(line["seconds"] - sum(line["phases"].get(phase, 0.0) for phase in _NOW_AND_THEN))


def computing(line: Mapping[str, Any], phase: str) -> float:
    """Returns the seconds of a phase in which a rank did not wait for others."""
    return max(line["phases"].get(phase, 0.0) - sum(line["waits"].get(phase, {}).values()), 0.0)


def slow_ranks(run: RunData, numbers: Iterable[int]) -> list[SlowRank]:
    """Returns the ranks that compute longer than the others, slowest first.

    The score of a rank is its time over the median of the other ranks' times, so that it works with two ranks. Ranks
    that do other work (stages of a pipeline) are compared with their like.

    Args:
        run: The run.
        numbers: Steps that count.
    """
    numbers = list(numbers)
    alike: dict[Any, list[RankRun]] = defaultdict(list)
    for rank_run in run.ranks.values():
        alike[rank_run.facts.get("stage", 0)].append(rank_run)
    found = []
    for group in alike.values():
        for phase in PHASES:
            scores = _scores(group, phase, numbers)
            found += [
                SlowRank(r.rank, r.facts.get("host", "?"), phase, *scores[r.rank])
                for r in group
                if r.rank in scores and scores[r.rank][0] > SLOW
            ]
    return sorted(found, key=lambda slow: -slow.factor)


def _scores(group: list[RankRun], phase: str, numbers: list[int]) -> dict[int, tuple[float, float]]:
    """Returns for each rank its relative score and its share of :class:`SlowRank`; empty for a phase without time."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for number in numbers:
        times = sorted((computing(r.steps[number], phase), r.rank) for r in group if number in r.steps)
        whole = max((r.steps[number]["seconds"] for r in group if number in r.steps), default=0.0)
        if len(times) < 2 or whole <= 0:
            continue
        for place, (seconds, rank) in enumerate(times):
            usual = max(_median_without(times, place), 0.01 * whole)  # below that it is too short to matter
            found[rank].append((seconds / usual, (seconds - usual) / whole))
    return {rank: (median(f for f, _ in pairs), median(s for _, s in pairs)) for rank, pairs in found.items()}


def _median_without(times: list[tuple[float, int]], left_out: int) -> float:
    """Returns the median of sorted times but one, without a copy: there may be thousands of ranks."""
    count = len(times) - 1
    low, high = (at + (at >= left_out) for at in ((count - 1) // 2, count // 2))
    return (times[low][0] + times[high][0]) / 2


def advise(shares: Iterable[TimeRow], slow: Iterable[SlowRank]) -> list[str]:
    """Returns what to change first, as sentences, most valuable first."""
    found: list[tuple[float, str]] = []
    worst = max(slow, key=lambda rank: rank.share, default=None)
    of_worst = 0.0 if worst is None else worst.share
    by_axis: dict[str, float] = defaultdict(float)
    for share in shares:
        if share.axis:
            by_axis[share.axis] += share.share
        elif worst is not None and worst.phase == share.phase and 2 * of_worst > share.share:
            continue  # the sentence about that rank is about the same time
        elif share.share > _WORTH_A_WORD.get(share.phase, 1.0):
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
    """Returns what messages and the page call a phase."""
    return _PHASE_NAMES.get(phase, phase)


_PHASE_NAMES = {"step": "update", "schedule": "schedule of the stage", OUTSIDE: "outside the engine"}


def mfu(run: RunData, step_seconds: float) -> float | None:
    """Returns the operations that the first rank counted in its model, per second, over the rate of its device.

    What recomputation repeats does not count. None where nothing was counted.
    """
    counted = next((event for event in reversed(run.first.events) if event["name"] == "operations"), None)
    if counted is None or not step_seconds:
        return None
    operations = counted["of_update"]
    if counted["tokens"]:  # an update may have more tokens than another one
        operations *= mean(line["tokens"] for line in run.first.steps.values()) / counted["tokens"]
    return float(operations / step_seconds / counted["device_flops"])


_WORTH_A_WORD = {OUTSIDE: 0.1, "save": 0.05, "step": 0.3}
"""Share of the time above which a phase is worth a sentence."""

_PHASE_ADVICE = {
    OUTSIDE: "lies between calls of the engine: data loading or the program's own code. Give the loader more workers",
    "save": "goes into saving: set checkpoint.async_save, or save less often",
    "step": "goes into the update: raise gradient_accumulation_steps, or keep the optimizer on the device",
}

_AXIS_ADVICE = {row.name: row.advice for row in ROWS if row.advice}
