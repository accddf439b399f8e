"""Finds the longest sequences with which training fits, from plans of a few lengths.

The time of a plan grows with its tiles, so few plans are made, and few long ones. At each moment of a step memory is
linear in the tokens; which moment is the peak depends on the length. So a line is fitted to each moment of two plans,
and the next plan has the length at which the first line reaches the available memory. The lines are trusted if the last
plan was as they predicted.
"""

from __future__ import annotations

import math
from dataclasses import replace

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.planner import make_plan
from deepspeed.plan.result import Plan, Request
from deepspeed.zero.placement import Tier

_MOST = 1 << 32  # tokens; above this, memory is not the limit
_STEP = 8  # growth of the length while the lines are not trusted yet
_NEAR = 0.01  # largest error of trusted lines, relative to a plan's sum


def longest_sequence(request: Request, *, grain: int = 1024) -> Plan:
    """Returns the plan with the longest sequences that fit, a multiple of ``grain`` and of a sequence's ranks.

    Memory grows with every token, so there is a longest length that fits. It is confirmed by a plan; that the next
    length does not fit is seen in a plan too, or follows from trusted lines.

    Raises:
        DeepSpeedConfigError: Not even the shortest sequence fits, or the configuration cannot run.
    """
    if grain < 1:
        raise DeepSpeedConfigError(f"longest sequence: expected a grain of 1 token or more, found {grain}")
    ranks = max(int(request.config.get("sequence_parallel_size") or 1), 1)
    unit = math.lcm(grain, ranks)
    fitting = _planned(request, unit)
    if not fitting.fits:
        raise DeepSpeedConfigError(
            f"longest sequence: not even {unit:,} tokens fit ({fitting.device_bytes:,} bytes on the device, "
            f"{fitting.machine.usable:,} usable); see what a plan of that length suggests"
        )
    before, last = fitting, _planned(request, 2 * unit)
    failing = None if last.fits else last
    if last.fits:
        fitting = last
    believed = halve = False
    while failing is None or _length(failing) - _length(fitting) > unit:
        lines = _Lines(before, last)
        guess = lines.longest(unit)
        if believed and guess == _length(fitting):
            break
        if failing is None:
            most = _MOST // unit * unit if believed else _STEP * _length(fitting)
        else:
            most = _length(failing) - unit
        if halve and failing is not None:
            guess = (_length(fitting) + _length(failing)) // 2 // unit * unit
        guess = min(max(guess, _length(fitting) + unit), most)
        made = _planned(request, guess)
        believed = lines.miss(made) <= _NEAR * made.device_bytes
        halve = not believed and not halve
        if made.fits:
            fitting = made
            if guess >= _MOST // unit * unit:
                break
        else:
            failing = made
        before, last = (last, made) if failing is None else (fitting, failing)
    return fitting


class _Lines:
    """Holds memory as a linear function of tokens, by planned rank, tier and moment."""

    def __init__(self, one: Plan, other: Plan) -> None:
        self._plan = one
        self._lengths = _length(one), _length(other)
        self._tops = [
            {
                tier: [(tops.get(moment, top), top) for moment, top in its.simulated.tops[tier].items()]
                for tier, tops in mine.simulated.tops.items()
            }
            for mine, its in zip(one.parts, other.parts, strict=True)
        ]

    def longest(self, unit: int) -> int:
        """Returns the most tokens with which everything fits, a multiple of ``unit``; 0: none."""
        low, high = 0, _MOST // unit
        while low < high:
            middle = (low + high + 1) // 2
            device, host = (self._most(tier, middle * unit) for tier in (Tier.DEVICE, Tier.HOST))
            fits = self._plan.would_fit(int(device), int(host * self._plan.machine.devices_per_node))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * unit

    def miss(self, plan: Plan) -> float:
        """Returns the largest difference between the lines and a plan, in bytes."""
        return max(
            abs(self._most(tier, _length(plan)) - max(part.simulated.peaks[tier].nbytes for part in plan.parts))
            for tier in (Tier.DEVICE, Tier.HOST)
        )

    def _most(self, tier: Tier, tokens: int) -> float:
        first, second = self._lengths
        share = (tokens - first) / (second - first)
        return max((a + (b - a) * share for part in self._tops for a, b in part[tier]), default=0.0)


def _length(plan: Plan) -> int:
    return plan.request.sequence_length


def _planned(request: Request, tokens: int) -> Plan:
    return make_plan(replace(request, sequence_length=tokens), compare=False)
