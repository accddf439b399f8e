"""What a rank moves and computes, in numbers that can be added."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Flow:
    """What passed since the start of counting; differences and multiples of it are taken.

    Attributes:
        asked: Collectives of the schedule: name to calls and bytes.
        ran: What the backend ran for them.
        flops: Floating-point operations.
        down: Bytes from device to host.
        up: Bytes from host to device.
        read: Bytes read from files.
        written: Bytes written to files.
    """

    asked: dict[str, tuple[int, int]] = field(default_factory=dict)
    ran: dict[str, tuple[int, int]] = field(default_factory=dict)
    flops: int = 0
    down: int = 0
    up: int = 0
    read: int = 0
    written: int = 0

    def plus(self, other: Flow, times: int) -> Flow:
        """This and ``times`` the other."""
        return Flow(
            asked=_summed(self.asked, other.asked, times),
            ran=_summed(self.ran, other.ran, times),
            flops=self.flops + times * other.flops,
            down=self.down + times * other.down,
            up=self.up + times * other.up,
            read=self.read + times * other.read,
            written=self.written + times * other.written,
        )


def _summed(
    first: dict[str, tuple[int, int]], second: dict[str, tuple[int, int]], times: int
) -> dict[str, tuple[int, int]]:
    total = {}
    for name in first.keys() | second.keys():
        calls, nbytes = first.get(name, (0, 0))
        more_calls, more_bytes = second.get(name, (0, 0))
        if calls + times * more_calls or nbytes + times * more_bytes:
            total[name] = (calls + times * more_calls, nbytes + times * more_bytes)
    return total
