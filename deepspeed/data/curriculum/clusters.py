"""Which samples a curriculum has allowed so far, in the groups in which it allowed them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from deepspeed.data.indexed.dataset import MMapIndexedDataset


class MetricOrder:
    """The samples of a dataset in the order of one measure of difficulty, easiest first.

    Args:
        name: Of the metric, for messages.
        samples: Their numbers in that order.
        values: The distinct values that occur, rising; None where only the order counts.
        ends: For each value, how many samples have it or a lower one.
        max_difficulty: The percentile that stands for all samples; None: difficulties are values.
    """

    def __init__(
        self,
        name: str,
        samples: NDArray[Any],
        values: NDArray[Any] | None,
        ends: NDArray[numpy.int64],
        max_difficulty: int | None = None,
    ) -> None:
        self.name = name
        self.samples = samples
        self._values = values
        self._ends = ends
        self._max = max_difficulty

    @classmethod
    def read(
        cls, name: str, sample_path: str | Path, metric_path: str | Path | None, max_difficulty: int | None
    ) -> MetricOrder:
        """From the index files that an analysis has written (:mod:`deepspeed.data.analysis`).

        Args:
            name: Of the metric.
            sample_path: ``..._index_to_sample``: for each value a row of samples.
            metric_path: ``..._index_to_metric``: the values; not needed for percentiles.
            max_difficulty: As above.

        Raises:
            ValueError: The two do not belong together.
        """
        rows = MMapIndexedDataset(sample_path)
        ends = numpy.cumsum(rows.sizes, dtype=numpy.int64)
        values = None
        if max_difficulty is None:
            assert metric_path is not None
            values = MMapIndexedDataset(metric_path).values
            if len(values) != len(rows):
                raise ValueError(
                    f"the index files of the metric {name} do not belong together: {sample_path} has {len(rows)} rows "
                    f"of samples, {metric_path} {len(values)} values"
                )
        return cls(name, rows.values, values, ends, max_difficulty)

    def allowed(self, difficulty: int) -> int:
        """Returns how many samples, from the easiest on, a difficulty allows."""
        if self._max is not None:
            per_percentile = len(self.samples) // self._max
            return len(self.samples) if difficulty >= self._max else per_percentile * difficulty
        assert self._values is not None
        rows = int(numpy.searchsorted(self._values, difficulty, side="right"))
        return int(self._ends[rows - 1]) if rows else 0

    def least(self) -> str:
        """Returns the easiest difficulty that allows anything, in words."""
        if self._values is None:
            return "percentile 1"
        return str(self._values[0]) if len(self._values) else "none, as the index is empty"


class Clusters:
    """Samples in the groups in which they were allowed; a group has no sample of an earlier one.

    Args:
        metrics: Those that decide; none: all samples are one group.
        num_samples: Of the dataset.

    Attributes:
        members: The numbers of the samples of each group.
        bounds: The difficulties that formed each group.
    """

    def __init__(self, metrics: list[MetricOrder], num_samples: int) -> None:
        self._metrics = metrics
        self._num_samples = num_samples
        self._taken = numpy.zeros(num_samples if len(metrics) > 1 else 0, dtype=bool)
        self._before = 0  # allowed by the only metric so far
        self.members: list[NDArray[Any]] = []
        self.bounds: list[dict[str, int]] = []

    def grow(self, difficulties: Mapping[str, int]) -> None:
        """Forms a group of what the difficulties allow and no group has, if there is such a sample.

        Raises:
            ValueError: Still no sample at all is allowed.
        """
        fresh = self._fresh(difficulties)
        if len(fresh):
            if int(fresh.max()) >= self._num_samples:
                raise ValueError(
                    f"the index of the metric(s) {', '.join(m.name for m in self._metrics)} contains sample "
                    f"{int(fresh.max())}, but the dataset has {self._num_samples}; analyze this dataset anew"
                )
            self.members.append(fresh)
            self.bounds.append(dict(difficulties))
        elif not self.members:
            at = ", ".join(f"{m.name} {difficulties[m.name]} (the easiest sample: {m.least()})" for m in self._metrics)
            raise ValueError(f"the curriculum allows no sample at {at}; raise min_difficulty")

    def _fresh(self, difficulties: Mapping[str, int]) -> NDArray[Any]:
        if not self._metrics:
            return numpy.arange(0 if self.members else self._num_samples)
        if len(self._metrics) == 1:
            (metric,) = self._metrics
            before, now = self._before, metric.allowed(difficulties[metric.name])
            self._before = max(before, now)
            return metric.samples[before:now]
        times = numpy.zeros(self._num_samples, dtype=numpy.uint8)
        for metric in self._metrics:
            times[metric.samples[: metric.allowed(difficulties[metric.name])]] += 1
        fresh = numpy.flatnonzero((times == len(self._metrics)) & ~self._taken)
        self._taken[fresh] = True
        return fresh

    def sizes(self) -> NDArray[numpy.int64]:
        """Samples per group."""
        return numpy.array([len(members) for members in self.members], dtype=numpy.int64)
