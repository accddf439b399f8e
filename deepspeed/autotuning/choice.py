"""Which candidate is measured next, and when none can win any more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FIRST_ERROR = 0.25
"""Half width of the error bar of predicted times, as a share, before two candidates have been measured."""

_LEAST_ERROR = 0.03

START_ERROR = 0.05
"""Standard deviation of the measured time of one candidate from start to start of the script, as a share."""

WORTH_A_TRIAL = 0.03
"""Gain, as a share of the best time, that another candidate must be able to bring to be measured."""


@dataclass(frozen=True)
class CandidatePlan:
    """A candidate and what is expected of it; ranks of the script plan it, the command chooses among them.

    Attributes:
        name: The name of its folder.
        changes: What is different from the script's configuration.
        fits: Whether memory suffices.
        seconds: Predicted wall time of a step.
        device_bytes: Highest sum on a device.
        usable_bytes: What a device offers.
        flops: Operations of a step and rank.
        refusal: Why it cannot run; empty otherwise.
    """

    name: str
    changes: Mapping[str, Any]
    fits: bool = False
    seconds: float = 0.0
    device_bytes: int = 0
    usable_bytes: int = 0
    flops: int = 0
    refusal: str = ""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> CandidatePlan:
        """Takes what a rank has written about a candidate."""
        return cls(**{name: facts[name] for name in cls.__dataclass_fields__ if name in facts})


@dataclass
class TrialQueue:
    """The candidates that may run, in the order of their predicted times, and what is known of the measured ones.

    Attributes:
        rows: All candidates.
        most: Trials that are measured at most.
        patience: Trials without gain after which it stops.
        measured: Seconds of a step by name.
        failed: Why a trial failed, by name.
        micro_batches: Those that the script can do; None: not known yet.
    """

    rows: Sequence[CandidatePlan]
    most: int = 3
    patience: int = 5
    measured: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    micro_batches: set[int] | None = None

    def runnable(self) -> list[CandidatePlan]:
        """Returns the candidates that can still be tried, the one with the shortest predicted step first."""
        found = [row for row in self.rows if row.fits and not row.refusal]
        found = [row for row in found if row.name not in self.measured and row.name not in self.failed]
        if self.micro_batches is not None:
            micro = "train_micro_batch_size_per_gpu"
            found = [row for row in found if row.changes.get(micro) in self.micro_batches]
        return sorted(found, key=lambda row: row.seconds)

    @property
    def best(self) -> str | None:
        """Returns the name of the measured candidate with the shortest :meth:`estimate`."""
        return min(self.measured, key=self.estimate, default=None)

    @property
    def scale(self) -> float:
        """Returns measured over predicted time, the geometric mean of the trials."""
        logs = [math.log(ratio) for ratio in self._ratios()]
        return math.exp(sum(logs) / len(logs)) if logs else 1.0

    @property
    def error(self) -> float:
        """Returns the half width of the error bar of a predicted time, as a share of it.

        After two trials it is twice the largest distance of a trial from the mean, and 3 % at least.
        """
        ratios = self._ratios()
        if len(ratios) < 2:
            return FIRST_ERROR
        return max(_LEAST_ERROR, 2 * max(abs(ratio / self.scale - 1) for ratio in ratios))

    def _ratios(self) -> list[float]:
        predicted = {row.name: row.seconds for row in self.rows}
        return [seconds / predicted[name] for name, seconds in self.measured.items() if predicted.get(name)]

    def expected(self, row: CandidatePlan) -> float:
        """Returns the predicted seconds of a step in the light of the trials so far."""
        return row.seconds * self.scale

    def estimate(self, name: str) -> float:
        """Returns the most likely seconds of a step of a measured candidate.

        Two starts of one candidate differ, so that a shorter measured time alone means little where predictions are
        known to be close. It is the geometric mean of measured and predicted time, each weighted by the inverse of its
        variance; half of :attr:`error` stands for the standard deviation of a prediction.
        """
        measured = self.measured[name]
        expected = next((self.expected(row) for row in self.rows if row.name == name), 0.0)
        if expected <= 0.0:
            return measured
        of_start, of_prediction = START_ERROR**2, (self.error / 2) ** 2
        share = of_start / (of_start + of_prediction)
        return measured ** (1 - share) * expected**share

    def next(self) -> CandidatePlan | None:
        """Returns the candidate that is measured next; None: :meth:`why_over` returns the reason."""
        return None if self.why_over() else self.runnable()[0]

    def why_over(self) -> str:
        """Returns why no further candidate is measured; empty while one should be."""
        left = self.runnable()
        if not left:
            return "every candidate that fits has been tried"
        if len(self.measured) >= self.most:
            return f"{self.most} candidates were measured (autotuning.tuner_num_trials)"
        if len(self.failed) >= self.most + 2:
            return f"{len(self.failed)} trials failed"
        names = list(self.measured)
        if self.best is not None:
            if len(names) - 1 - names.index(self.best) >= self.patience:
                return f"{self.patience} trials brought no improvement (autotuning.tuner_early_stopping)"
            quickest = self.expected(left[0]) * (1 - self.error)
            fastest = self.estimate(self.best)
            if quickest >= fastest * (1 - WORTH_A_TRIAL):
                return (
                    f"no other can win by more than {WORTH_A_TRIAL:.0%}: the next is predicted to take "
                    f"{self.expected(left[0]) * 1e3:.1f} ms +- {self.error:.0%}, the best {fastest * 1e3:.1f} ms"
                )
        return ""
