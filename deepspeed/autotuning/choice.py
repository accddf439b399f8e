"""Chooses the candidate to measure next, and stops when no other candidate can be the fastest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FIRST_ERROR = 0.25
"""Relative half width of the error bar of predicted times before two candidates have been measured."""

_LEAST_ERROR = 0.03

START_ERROR = 0.05
"""Relative standard deviation of a candidate's measured time between starts of the script."""

WORTH_A_TRIAL = 0.03
"""Gain, relative to the best time, that a candidate must be able to bring to be measured."""


@dataclass(frozen=True)
class CandidatePlan:
    """A candidate and its predictions. The ranks of the script make it; the command chooses among all."""

    name: str  # the candidate's name, also of its folder
    changes: Mapping[str, Any]  # differences from the script's configuration
    fits: bool = False  # whether device and host memory suffice
    seconds: float = 0.0  # predicted wall time of an update
    device_bytes: int = 0  # predicted peak memory of a device
    usable_bytes: int = 0  # usable memory of a device
    flops: int = 0  # floating-point operations of one rank per update
    refusal: str = ""  # why it cannot run; empty if it can

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> CandidatePlan:
        """Returns the candidate that a rank has written as a dict; unknown keys are ignored."""
        return cls(**{name: facts[name] for name in cls.__dataclass_fields__ if name in facts})


@dataclass
class TrialQueue:
    """All candidates and the results of those that were measured."""

    rows: Sequence[CandidatePlan]  # all candidates
    most: int = 3  # maximum number of measured trials
    patience: int = 5  # number of trials without gain after which the search stops
    measured: dict[str, float] = field(default_factory=dict)  # measured seconds of an update, by name
    failed: dict[str, str] = field(default_factory=dict)  # why a trial failed, by name
    micro_batches: set[int] | None = None  # micro-batch sizes that the script can run; None: any, as far as is known

    def runnable(self) -> list[CandidatePlan]:
        """Returns the candidates that can still be tried, sorted by predicted time."""
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
        """Returns the geometric mean over the trials of measured over predicted time; 1 without a trial."""
        logs = [math.log(ratio) for ratio in self._ratios()]
        return math.exp(sum(logs) / len(logs)) if logs else 1.0

    @property
    def error(self) -> float:
        """Returns the relative half width of the error bar of a predicted time: twice the largest deviation of a trial.

        A single trial has no deviation from :attr:`scale`; the least is 3 %.
        """
        ratios = self._ratios()
        if len(ratios) < 2:
            return FIRST_ERROR
        return max(_LEAST_ERROR, 2 * max(abs(ratio / self.scale - 1) for ratio in ratios))

    def _ratios(self) -> list[float]:
        predicted = {row.name: row.seconds for row in self.rows}
        return [seconds / predicted[name] for name, seconds in self.measured.items() if predicted.get(name)]

    def expected(self, row: CandidatePlan) -> float:
        """Returns the predicted seconds of an update, scaled by :attr:`scale`."""
        return row.seconds * self.scale

    def estimate(self, name: str) -> float:
        """Returns the most likely seconds of an update of a measured candidate.

        It is the geometric mean of measured and predicted time, each weighted by the inverse of its variance, because
        two starts of one candidate differ. Half of :attr:`error` is taken as the standard deviation of a prediction.
        """
        measured = self.measured[name]
        expected = next((self.expected(row) for row in self.rows if row.name == name), 0.0)
        if expected <= 0.0:
            return measured
        of_start, of_prediction = START_ERROR**2, (self.error / 2) ** 2
        share = of_start / (of_start + of_prediction)
        return measured ** (1 - share) * expected**share

    def next(self) -> CandidatePlan | None:
        """Returns the candidate to measure next; None if the search is over, see :meth:`why_over`."""
        return None if self.why_over() else self.runnable()[0]

    def why_over(self) -> str:
        """Returns why the search is over; empty while another candidate should be measured."""
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
                    f"no other candidate can be faster by more than {WORTH_A_TRIAL:.0%}: the next is predicted to take "
                    f"{self.expected(left[0]) * 1e3:.1f} ms +- {self.error:.0%}, the best {fastest * 1e3:.1f} ms"
                )
        return ""
