"""The time of a step by cause, for predicted and for replayed steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepTimes:
    """The parts of a step on the busiest rank, in seconds. They add up to the step."""

    matmul: float = 0.0  # matrix products
    attention: float = 0.0
    traffic: float = 0.0  # elementwise operations
    exposed: dict[str, float] = field(default_factory=dict)  # exchanges that computation waits for, by axis
    host: float = 0.0  # waits for the host, which starts operations more slowly than the device runs them
    bubble: float = 0.0  # waits for other stages of a pipeline
    update: float = 0.0  # the optimizer's update

    @property
    def compute(self) -> float:
        """Seconds of computation."""
        return self.matmul + self.attention + self.traffic

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.compute + sum(self.exposed.values()) + self.host + self.bubble + self.update

    def rows(self) -> list[tuple[str, float]]:
        """Returns the parts with their names in tables."""
        found = [
            ("matrix products", self.matmul),
            ("attention", self.attention),
            ("elementwise operations", self.traffic),
        ]
        found += [(f"waits for exchanges, {axis}", seconds) for axis, seconds in sorted(self.exposed.items())]
        found += [("waits for the host", self.host), ("waits for other stages", self.bubble), ("update", self.update)]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns the step and its parts, in seconds."""
        return {
            "step_seconds": self.seconds,
            "compute_seconds": {"matmul": self.matmul, "attention": self.attention, "elementwise": self.traffic},
            "exposed_seconds": {axis: seconds for axis, seconds in sorted(self.exposed.items()) if seconds > 0},
            "host_seconds": self.host,
            "bubble_seconds": self.bubble,
            "update_seconds": self.update,
        }
