"""What the lines of a run mean: where the time went, which rank is slow, what to change first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from deepspeed.run_report.failures import find_failures
from deepspeed.run_report.recorder import OUTSIDE
from deepspeed.run_report.run_data import Line, RankRun, RunData

PHASES = ("forward", "backward", "step", "save", "load", OUTSIDE)
SLOW = 1.1
"""A rank is slow if it computes that many times as long as the median rank."""

_WARM_UP = 2  # steps that are left out of times: the first ones make buffers, groups and compiled code


@dataclass(frozen=True)
class TimeRow:
    """Seconds per step that went into one thing, the mean over ranks and steps.

    Attributes:
        phase: A name of :data:`PHASES`.
        axis: Ranks that were waited for; empty: computing, not waiting.
        seconds: Per step.
        share: Of the step.
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
        factor: Times as long as the median rank, the median over steps.
    """

    rank: int
    host: str
    phase: str
    factor: float


@dataclass(frozen=True)
class RunSummary:
    """What a run's report says in numbers.

    Attributes:
        steps: Steps of the run.
        step_seconds: Median time of a step.
        samples_per_second: Over all ranks; 0 where unknown.
        tokens_per_second: Over all ranks; 0 where the inputs hold no token ids.
        shares: Where the time of a step went, largest first.
        slow: Ranks that are slower than :data:`SLOW`, slowest first.
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
    slow = tuple(slow_ranks(run, counted))
    return RunSummary(
        steps=len(numbers),
        step_seconds=seconds,
        samples_per_second=samples / seconds if seconds else 0.0,
        tokens_per_second=_copies_out(run, tokens) / seconds if seconds else 0.0,
        shares=shares,
        slow=slow,
        advice=tuple(advise(shares, slow)),
        unfinished=tuple(rank for rank, r in run.ranks.items() if not r.has_ended),
        failures=tuple(_latest_failures(run)),
    )


def _latest_failures(run: RunData) -> list[Line]:
    """Returns the failures after the latest start of the program."""
    started = min((r.starts[-1] for r in run.ranks.values() if r.starts), default=0.0)
    return [failure for failure in find_failures(run) if failure["time"] >= started and not failure.get("restarted")]


def _copies_out(run: RunData, tokens: float) -> float:
    """Tensor ranks and stages see the same tokens; they count once."""
    axes = run.first.facts.get("axes", {})
    return tokens / (axes.get("tensor", 1) * axes.get("pipe", 1))


def time_shares(lines: Iterable[Mapping[str, Any]]) -> list[TimeRow]:
    """Returns where the time of steps went, largest first.

    Args:
        lines: Steps of any ranks.
    """
    total: dict[tuple[str, str], float] = defaultdict(float)
    count, whole = 0, 0.0
    for line in lines:
        count += 1
        whole += line["seconds"]
        for phase, seconds in line["phases"].items():
            waits = line["waits"].get(phase, {})
            total[phase, ""] += max(seconds - sum(waits.values()), 0.0)
            for axis, waited in waits.items():
                total[phase, axis] += waited
    found = [TimeRow(p, a, seconds / count, seconds / whole) for (p, a), seconds in total.items() if seconds > 0]
    return sorted(found, key=lambda share: -share.seconds)


def computing(line: Mapping[str, Any], phase: str) -> float:
    """Returns the seconds of a phase in which a rank did not wait for others."""
    return max(line["phases"].get(phase, 0.0) - sum(line["waits"].get(phase, {}).values()), 0.0)


def slow_ranks(run: RunData, numbers: Iterable[int]) -> list[SlowRank]:
    """Returns the ranks that compute longer than the median rank, slowest first.

    Ranks that do other work (stages of a pipeline) are compared with their like.

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
            factors = _factors(group, phase, numbers)
            found += [
                SlowRank(r.rank, r.facts.get("host", "?"), phase, factors[r.rank])
                for r in group
                if factors.get(r.rank, 1.0) > SLOW
            ]
    return sorted(found, key=lambda slow: -slow.factor)


def _factors(group: list[RankRun], phase: str, numbers: list[int]) -> dict[int, float]:
    """Returns for each rank its time over the median rank's (median of steps); empty for a phase without time."""
    found: dict[int, list[float]] = defaultdict(list)
    if len(group) < 2:
        return {}
    for number in numbers:
        times = {r.rank: computing(r.steps[number], phase) for r in group if number in r.steps}
        usual = median(times.values()) if times else 0.0
        whole = max((r.steps[number]["seconds"] for r in group if number in r.steps), default=0.0)
        if usual < 0.01 * whole:  # too short to matter
            usual = 0.01 * whole
        for rank, seconds in times.items():
            if usual > 0:
                found[rank].append(seconds / usual)
    return {rank: median(factors) for rank, factors in found.items()}


def advise(shares: Iterable[TimeRow], slow: Iterable[SlowRank]) -> list[str]:
    """Returns what to change first, as sentences, most valuable first."""
    found: list[tuple[float, str]] = []
    by_axis: dict[str, float] = defaultdict(float)
    for share in shares:
        if share.axis:
            by_axis[share.axis] += share.share
        elif share.share > _WORTH_A_WORD.get(share.phase, 1.0):
            found.append((share.share, f"{share.share:.0%} of the time {_PHASE_ADVICE[share.phase]}"))
    for axis, part in by_axis.items():
        if part > 0.1:
            advice = _AXIS_ADVICE.get(axis, "look at the links between these ranks")
            found.append((part, f"{part:.0%} of the time is spent waiting along the axis {axis}: {advice}"))
    worst = next(iter(slow), None)
    if worst is not None:
        where = "outside the engine" if worst.phase == OUTSIDE else f"in {worst.phase}"
        what = "its data loading and its own code" if worst.phase == OUTSIDE else "that device"
        text = (
            f"rank {worst.rank} ({worst.host}) takes {worst.factor:.2f} times as long as the median rank {where}, and "
            f"the others wait for it: look at {what}"
        )
        found.append((1 - 1 / worst.factor, text))
    return [text for _, text in sorted(found, reverse=True)]


_WORTH_A_WORD = {OUTSIDE: 0.1, "save": 0.05, "step": 0.3}
"""Share of the time above which a phase is worth a sentence."""

_PHASE_ADVICE = {
    OUTSIDE: "lies between calls of the engine: data loading or the program's own code. Give the loader more workers",
    "save": "goes into saving: set checkpoint.async_save, or save less often",
    "step": "goes into the update: raise gradient_accumulation_steps, or keep the optimizer on the device",
}

_AXIS_ADVICE = {
    "data": "raise gradient_accumulation_steps, or lower the ZeRO stage if memory allows",
    "tensor": "keep tensor_parallel.autotp_size within one node, or make it smaller",
    "sequence": "keep sequence_parallel_size within one node, or make it smaller",
    "pipe": "raise gradient_accumulation_steps, or take an interleaved schedule",
    "expert": "keep the experts' ranks within one node, or balance the routes",
}
