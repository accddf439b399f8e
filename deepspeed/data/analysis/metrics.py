"""What an analysis collects of one metric, and the files that it ends in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from deepspeed.data.indexed.dataset import write_dataset
from deepspeed.data.indexed.format import smallest_type

SINGLE, SUM = "single_value_per_sample", "accumulate_value_over_samples"
KINDS = (SINGLE, SUM)


class MetricValues:
    """The values of one metric for the samples that one part of an analysis has seen.

    Args:
        kind: ``single_value_per_sample``: a number for each sample; ``accumulate_value_over_samples``: a vector that is
            added up.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._values: list[NDArray[Any]] = []
        self._samples: list[NDArray[numpy.int64]] = []
        self._sum: NDArray[Any] | None = None

    def add(self, answer: Any, samples: NDArray[numpy.int64], name: str) -> None:
        """Takes in what a metric function gave for a batch.

        Args:
            answer: A tensor or array of integers.
            samples: The numbers of the batch's samples; for a single value as many as the answer has rows.
            name: Of the metric.

        Raises:
            ValueError: It is not one integer per sample, or not of one length.
        """
        values = numpy.asarray(answer.cpu() if hasattr(answer, "cpu") else answer)
        if not numpy.issubdtype(values.dtype, numpy.integer):
            raise ValueError(f"metric {name}: its function gave {values.dtype}; index files hold integers, so round it")
        if self.kind == SUM:
            if self._sum is not None and self._sum.shape != values.shape:
                raise ValueError(f"metric {name}: its vectors differ in length, {self._sum.shape} and {values.shape}")
            self._sum = values.astype(numpy.int64) if self._sum is None else self._sum + values
            return
        values = values.reshape(-1)
        if len(values) != len(samples):
            raise ValueError(
                f"metric {name}: its function gave {len(values)} values for a batch of {len(samples)} samples; a "
                f"metric of type {SINGLE} gives one for each"
            )
        self._values.append(values)
        self._samples.append(samples)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns what was collected, for another process."""
        if self.kind == SUM:
            return {"sum": self._sum if self._sum is not None else numpy.empty(0, numpy.int64)}
        none = numpy.empty(0, numpy.int64)
        return {
            "values": numpy.concatenate([none, *self._values]).astype(numpy.int64),
            "samples": numpy.concatenate([none, *self._samples]),
        }


def write_metric(folder: Path, name: str, kind: str, parts: Sequence[dict[str, NDArray[Any]]]) -> None:
    """Writes the index files of one metric.

    Args:
        folder: Where; made if it is not there.
        name: Of the metric.
        kind: Of the metric.
        parts: What each part of the analysis has collected.

    Raises:
        ValueError: A sample was seen twice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if kind == SUM:
        sums = [part["sum"] for part in parts if len(part["sum"])]
        total = numpy.sum(sums, axis=0) if sums else numpy.empty(0, numpy.int64)
        _write(folder / f"{name}_metric_value", total.reshape(-1), numpy.array([total.size]))
        return
    values = numpy.concatenate([part["values"] for part in parts])
    samples = numpy.concatenate([part["samples"] for part in parts])
    # By value, and within one value by number.
    order = numpy.lexsort((samples, values))
    by_value, ids = values[order], samples[order]
    distinct, counts = numpy.unique(by_value, return_counts=True)
    by_sample = numpy.argsort(samples, kind="stable")
    twice = numpy.flatnonzero(numpy.diff(samples[by_sample]) == 0)
    if len(twice):
        raise ValueError(
            f"metric {name}: sample {samples[by_sample][twice[0]]} was analyzed more than once; the numbers that the "
            "batches have in `index`, or sample_indices, must be different for all samples"
        )
    ones = numpy.ones(len(values), dtype=numpy.int64)
    _write(folder / f"{name}_sample_to_metric", values[by_sample], ones)
    _write(folder / f"{name}_index_to_metric", distinct, ones[: len(distinct)])
    _write(folder / f"{name}_index_to_sample", ids, counts)
    step = max(1, len(distinct) // 100)
    merged = numpy.add.reduceat(counts, numpy.arange(0, len(counts), step)) if len(counts) else counts
    _write(folder / f"{name}_index_to_sample_percentile_merged", ids, merged)


def _write(prefix: Path, values: NDArray[Any], sizes: NDArray[Any]) -> None:
    kind = smallest_type(int(values.min()), int(values.max())) if len(values) else numpy.uint8
    write_dataset(prefix, values.astype(kind), sizes)
