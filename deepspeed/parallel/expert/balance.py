"""How evenly the routes of one rank are spread over the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Balance:
    """Where the routes of one forward went.

    Attributes:
        counts: By expert of all ranks: routes of this rank that reached it.
        load: By expert of this rank: rows that it saw, of all ranks.
        dropped: Routes of this rank that reached none.
    """

    counts: tuple[int, ...]
    load: tuple[int, ...]
    dropped: int

    @classmethod
    def of(cls, plan: Any) -> Balance:
        """That of a ``dispatch.Plan``."""
        routes = plan.num_choices * plan.num_tokens
        return cls(plan.mine, tuple(plan.load), routes - sum(plan.mine))

    @property
    def imbalance(self) -> float:
        """The most loaded expert's routes over the mean; 1 is even, and so is nothing at all."""
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total if total else 1.0

    @property
    def dropped_share(self) -> float:
        """Dropped routes over all."""
        routes = self.dropped + sum(self.counts)
        return self.dropped / routes if routes else 0.0

    @property
    def shares(self) -> list[float]:
        """Each expert's share of the routes that reached one."""
        total = max(sum(self.counts), 1)
        return [count / total for count in self.counts]
