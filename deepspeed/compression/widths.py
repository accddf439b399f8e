"""When weights have how many bits: the schedule of mixture-of-quantisation, a function of the step alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class BitWidth(NamedTuple):
    """Bits of a weight at some step.

    Attributes:
        bits: Width of its codes.
        whole_share: Share of the weight as it is, in the mixture with the rounded one.
    """

    bits: int
    whole_share: float


@dataclass(frozen=True)
class WidthSchedule:
    """From ``start`` to ``target`` bits, one at a time, the time between two falls doubling.

    Attributes:
        offset: Updates before which nothing is rounded.
        start: Bits at first.
        target: Bits in the end.
        period: Updates after which, counted from ``offset``, they fall first; then after twice as many, and so on.
        mixing: By how much the share of the whole weight falls at each update; it begins at 1 at each new width. None:
            weights are rounded entirely.
    """

    offset: int
    start: int
    target: int
    period: int = 1
    mixing: float | None = None

    def at(self, step: int) -> BitWidth | None:
        """Returns the width after this many updates; None: whole."""
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
        """The update from which on the width is the last."""
        return self.offset + (self.period * 2 ** (self.start - self.target - 1) if self.start > self.target else 0)
