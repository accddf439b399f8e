"""Going through a share of a dataset once, asking every metric about each batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
from torch.utils.data import DataLoader, Subset

from deepspeed.data.analysis.metrics import KINDS, SINGLE, MetricValues


@dataclass(frozen=True)
class Metrics:
    """What is asked about every batch.

    Attributes:
        names: Of the metrics.
        functions: For each a function of a batch that gives integers.
        kinds: For each ``single_value_per_sample`` or ``accumulate_value_over_samples``.
    """

    names: Sequence[str]
    functions: Sequence[Callable[[Any], Any]]
    kinds: Sequence[str]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.functions) == len(self.kinds):
            raise ValueError(
                f"metric_names has {len(self.names)} entries, metric_functions {len(self.functions)}, metric_types "
                f"{len(self.kinds)}; give one of each for every metric"
            )
        for name, kind in zip(self.names, self.kinds, strict=True):
            if kind not in KINDS:
                raise ValueError(f"metric {name}: metric_type {kind!r} is none of {', '.join(KINDS)}")


@dataclass(frozen=True)
class SampleSource:
    """What is gone through.

    Attributes:
        dataset: Samples by number.
        batch_size: Samples at a time.
        collate_fn: Makes a batch of samples; None: torch's.
        sample_indices: The number of each sample in the dataset that is trained on; None: as here.
    """

    dataset: Any
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None = None
    sample_indices: Sequence[int] | None = field(default=None)

    def share(self, number: int, of: int) -> range:
        """Returns the samples of one of several equal shares."""
        count = len(self.dataset)
        return range(count * number // of, count * (number + 1) // of)


def walk(source: SampleSource, share: range, metrics: Metrics) -> list[MetricValues]:
    """Asks every metric about the samples of a share.

    Samples count by the rows that come of them, never by the fields of a batch. A batch that is a mapping with
    ``index`` says by itself which samples it has.
    """
    found = [MetricValues(kind) for kind in metrics.kinds]
    part = Subset(source.dataset, share)
    start = share.start
    for batch in DataLoader(part, batch_size=source.batch_size, collate_fn=source.collate_fn):
        count = min(source.batch_size, share.stop - start)
        samples = _numbers(source, batch, start, count)
        for name, function, kind, collected in zip(metrics.names, metrics.functions, metrics.kinds, found, strict=True):
            answer = function(batch)
            collected.add(answer, samples if kind == SINGLE else samples[:0], name)
        start += count
    return found


def _numbers(source: SampleSource, batch: Any, start: int, count: int) -> numpy.typing.NDArray[numpy.int64]:
    if isinstance(batch, Mapping) and "index" in batch:
        return numpy.asarray(batch["index"], dtype=numpy.int64).reshape(count, -1)[:, 0]
    if source.sample_indices is not None:
        return numpy.asarray(source.sample_indices[start : start + count], dtype=numpy.int64)
    return numpy.arange(start, start + count)
