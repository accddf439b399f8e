"""The bit width of a weight as a function of the step: the schedule of mixture-of-quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class BitWidth(NamedTuple):
    """The bit width of a weight at some step."""

    bits: int  # bits of its codes
    whole_share: float  # fraction of the unrounded weight in its mixture with the rounded one


@dataclass(frozen=True)
class WidthSchedule:
    """Lowers the bits from ``start`` to ``target``, one at a time; each fall comes after twice as many updates."""

    offset: int  # number of updates after which rounding starts
    start: int  # first bit width
    target: int  # final bit width
    # Updates from ``offset`` to the first fall. The n-th fall is ``2 ** (n - 1) * period`` after ``offset``.
    period: int = 1
    # Amount by which the fraction of the unrounded weight falls at each update; it starts at 1 at each new width. None:
    # the weight is not mixed with the unrounded one.
    mixing: float | None = None

    def at(self, step: int) -> BitWidth | None:
        """Returns the width after ``step`` updates; None: not rounded yet."""
        count = step - self.offset
        if count < 0:
            return None
        bits, since, fall = self.start, 0, self.period
        while bits > self.target and count >= fall:
            bits, since, fall = bits - 1, fall, 2 * fall
        share = 0.0 if self.mixing is None else max(0.0, 1.0 - self.mixing * (count - since))
        return BitWidth(bits, share)

    @property
    def end(self) -> int:
        """The number of updates after which the width is ``target``."""
        return self.offset + (self.period * 2 ** (self.start - self.target - 1) if self.start > self.target else 0)
