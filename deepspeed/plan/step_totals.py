"""Totals of a rank's traffic and computation, which can be added."""

from __future__ import annotations

from dataclasses import dataclass, field

Along = dict[tuple[str, str], tuple[int, int]]
"""Maps names of a collective and its axis to calls and bytes."""


@dataclass
class StepTotals:
    """Sums up collectives and computation since the start of counting; supports differences and multiples."""

    # collectives of the schedule: name and axis to calls and bytes
    requested_along: Along = field(default_factory=dict)
    ran_along: Along = field(default_factory=dict)  # what the backend ran for them
    flops: int = 0  # floating-point operations
    down: int = 0  # bytes from device to host
    up: int = 0  # bytes from host to device
    read: int = 0  # bytes read from files
    written: int = 0  # bytes written to files

    @property
    def requested(self) -> dict[str, tuple[int, int]]:
        """Collectives of the schedule by name, over all axes."""
        return _over_axes(self.requested_along)

    @property
    def ran(self) -> dict[str, tuple[int, int]]:
        """Returns what the backend ran by name, over all axes."""
        return _over_axes(self.ran_along)

    def plus(self, other: StepTotals, times: int) -> StepTotals:
        """Returns the sum of this and ``times`` times ``other``."""
        return StepTotals(
            requested_along=_summed(self.requested_along, other.requested_along, times),
            ran_along=_summed(self.ran_along, other.ran_along, times),
            flops=self.flops + times * other.flops,
            down=self.down + times * other.down,
            up=self.up + times * other.up,
            read=self.read + times * other.read,
            written=self.written + times * other.written,
        )


def _over_axes(along: Along) -> dict[str, tuple[int, int]]:
    total: dict[str, tuple[int, int]] = {}
    for (name, _), (calls, nbytes) in along.items():
        before = total.get(name, (0, 0))
        total[name] = (before[0] + calls, before[1] + nbytes)
    return total


def _summed(first: Along, second: Along, times: int) -> Along:
    total: Along = {}
    for name in first.keys() | second.keys():
        calls, nbytes = first.get(name, (0, 0))
        more_calls, more_bytes = second.get(name, (0, 0))
        if calls + times * more_calls or nbytes + times * more_bytes:
            total[name] = (calls + times * more_calls, nbytes + times * more_bytes)
    return total
