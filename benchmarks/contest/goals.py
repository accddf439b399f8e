"""Ratios between contestants beside the project's goals, computed from :class:`contest.arena.Result`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from contest.arena import Result

LOSS_TOLERANCE = 0.02  # relative; rounding to bf16 and the order of sums have made less than 0.005 over ten steps
_LOSS_STEPS = 10
_WIDEST_SPREAD = 0.15  # of the ratio: above it the rounds differ too much for a verdict


@dataclass(frozen=True)
class Goal:
    """The largest ratio of two step times that meets a goal; ``at_most`` None: the ratio is shown without a goal."""

    ours: str
    other: str
    at_most: float | None


def _pairs(ours: str, **at_most: float | None) -> tuple[Goal, ...]:
    return tuple(Goal(ours, other.replace("_", "-"), value) for other, value in at_most.items())


# The goals beside DDP hold for both: autocast over fp32 weights, and bf16 weights with fp32 masters (our dtypes).
GOALS: Mapping[str, tuple[Goal, ...]] = {
    "gpt": (
        *_pairs("ours-3", fsdp2=0.70, upstream_3=0.58, ddp=0.90, ddp_bf16=0.90, floor=None),
        *_pairs("ours-2", upstream_2=0.70, ddp=0.95, ddp_bf16=0.95, floor=None),
        *_pairs("ours-1", upstream_1=0.65, ddp=0.95, ddp_bf16=0.95, floor=None),
        *_pairs("ours-0", upstream_0=0.75, ddp=0.95, ddp_bf16=0.95, floor_0=None),
        *_pairs("fsdp2", ddp=None, ddp_bf16=None, floor=None),
    ),
    "offload": (
        *_pairs("ours-2-host", upstream_2_host=0.80, ours_2=None),
        *_pairs("ours-3-host", upstream_3_host=0.62, ours_3=None),
        *_pairs("ours-3-host-all", upstream_3_host_all=0.62, ours_3=None),
    ),
    "thin": (
        *_pairs("ours-3", fsdp2=0.58, upstream_3=0.38, hand=1.05),
        *_pairs("ours-2", upstream_2=None, hand=None),
        *_pairs("ours-1", upstream_1=None, hand=None),
        *_pairs("ours-0", upstream_0=None, hand=None),
        *_pairs("fsdp2", hand=None),
    ),
    "small": (
        *_pairs("ours-3", fsdp2=1.00, upstream_3=None),
        *_pairs("ours-2", ddp=1.15, ddp_bf16=1.15, upstream_2=None),
        *_pairs("ours-1", ddp=1.15, ddp_bf16=1.15, upstream_1=None),
        *_pairs("ours-0", ddp=None, ddp_bf16=None, upstream_0=None),
    ),
}


@dataclass(frozen=True)
class Verdict:
    """One measured pair.

    Attributes:
        goal: Its goal.
        ratio: Median step time of ours over the other's.
        spread: Quartiles of the ratios of single rounds.
        fastest: Ratio of the fastest steps; on a busy machine less noisy than ``ratio``.
        cpu: Ratio of the median processor times of a step.
        memory: Ratio of peak resident memory in steady training.
        memory_above_import: The same ratio after the memory of ``import torch`` is subtracted on both sides.
    """

    goal: Goal
    ratio: float
    spread: tuple[float, float]
    fastest: float
    cpu: float
    memory: float
    memory_above_import: float

    @property
    def is_noisy(self) -> bool:
        """Returns whether the rounds differ too much for a verdict."""
        return self.spread[1] - self.spread[0] > _WIDEST_SPREAD * self.ratio

    @property
    def met(self) -> bool | None:
        """Returns whether the goal is met; None: there is no goal, or the rounds are too noisy."""
        return None if self.goal.at_most is None or self.is_noisy else self.ratio <= self.goal.at_most

    @property
    def words(self) -> str:
        """Returns the verdict as text; empty: there is no goal. A goal is missed by a share of the other's step."""
        if self.goal.at_most is None:
            return ""
        if self.is_noisy:
            return "undecided: noise"
        return "met" if self.met else f"missed by {self.ratio - self.goal.at_most:.2f}"


def judge(workload: str, results: Mapping[str, Result]) -> list[Verdict]:
    """Returns the verdicts on the pairs of ``workload`` of which both contestants finished."""
    verdicts = []
    for goal in GOALS[workload]:
        ours, other = results.get(goal.ours), results.get(goal.other)
        if ours is None or other is None or ours.failure or other.failure:
            continue
        rounds = [statistics.median(a) / statistics.median(b) for a, b in zip(ours.rounds, other.rounds, strict=True)]
        lower, _, upper = statistics.quantiles(rounds, n=4, method="inclusive") if len(rounds) > 1 else (rounds[0],) * 3
        above = [result.memory["steady_peak_mib"] - result.memory["imported_mib"] for result in (ours, other)]
        verdicts.append(
            Verdict(
                goal=goal,
                ratio=ours.median / other.median,
                spread=(lower, upper),
                fastest=ours.fastest / other.fastest,
                cpu=statistics.median(ours.cpu_seconds) / statistics.median(other.cpu_seconds),
                memory=ours.memory["steady_peak_mib"] / other.memory["steady_peak_mib"],
                memory_above_import=above[0] / above[1],
            )
        )
    return verdicts


def loss_distance(result: Result, reference: Result) -> float:
    """Returns the largest relative difference of the mean loss over the first ten steps."""
    pairs = list(zip(result.losses, reference.losses, strict=False))[:_LOSS_STEPS]
    return max(abs(a - b) / abs(b) for a, b in pairs)
