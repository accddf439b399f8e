"""The longest sequences with which a training fits, found by planning it with others."""

from __future__ import annotations

import math
from dataclasses import replace

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.planner import make_plan
from deepspeed.plan.result import Plan, Request

_MOST = 1 << 32  # tokens; what fits with more is not limited by memory


def longest_sequence(request: Request, *, grain: int = 1024) -> Plan:
    """The plan with the longest sequences that fit.

    Memory grows with every token, so there is one length up to which plans fit. It is looked for between one that does
    and one that does not, where a line through their memory crosses what the device offers; a few plans suffice.

    Args:
        request: What is planned; its own length does not matter.
        grain: The answer is a multiple of it and of the ranks that share a sequence.

    Returns:
        The plan; its request has the length.

    Raises:
        DeepSpeedConfigError: Not even the shortest sequence fits, or the configuration cannot run.
    """
    if grain < 1:
        raise DeepSpeedConfigError(f"longest sequence: expected a grain of 1 token or more, found {grain}")
    ranks = max(int(request.config.get("sequence_parallel_size") or 1), 1)
    unit = math.lcm(grain, ranks)
    shortest = _planned(request, unit)
    if not shortest.fits:
        raise DeepSpeedConfigError(
            f"longest sequence: not even {unit:,} tokens fit ({shortest.device_bytes:,} bytes on the device, "
            f"{shortest.machine.usable:,} usable); see what a plan of that length suggests"
        )
    fitting, failing = shortest, _planned(request, 2 * unit)
    while failing.fits and _length(failing) < _MOST:
        fitting, failing = failing, _planned(request, 2 * _length(failing))
    halve = False
    while _length(failing) - _length(fitting) > unit and not failing.fits:
        tried = _planned(request, _between(fitting, failing, unit, halve=halve))
        halve = not halve
        fitting, failing = (tried, failing) if tried.fits else (fitting, tried)
    return failing if failing.fits else fitting


def _between(fitting: Plan, failing: Plan, unit: int, *, halve: bool) -> int:
    """A length between two: where the line through them meets what is usable, or in the middle."""
    low, high = _length(fitting), _length(failing)
    share = 0.5
    grown = failing.device_bytes - fitting.device_bytes
    if not halve and grown > 0:
        share = (fitting.machine.usable - fitting.device_bytes) / grown
    guess = low + int((high - low) * share) // unit * unit
    return min(max(guess, low + unit), high - unit)


def _length(plan: Plan) -> int:
    return plan.request.sequence_length


def _planned(request: Request, tokens: int) -> Plan:
    return make_plan(replace(request, sequence_length=tokens), compare=False)
