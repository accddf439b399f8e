"""Measures the samples of a dataset on several processes, and writes the index files of the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Subset

from deepspeed import comm
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.data.indexed.dataset import write_dataset
from deepspeed.data.indexed.format import smallest_type
from deepspeed.errors import NotYetSupportedError

_PART = "collected.npz"


class DataAnalyzer:
    """Measures every sample of a dataset, for curricula and for batches by length.

    Each of ``num_workers`` processes, on any machines that share ``save_path``, calls :meth:`run_map`; then one calls
    :meth:`run_reduce`. For a metric ``m``, ``save_path/m`` gets indexed datasets (:mod:`deepspeed.data.indexed`):
    ``m_sample_to_metric`` (the value of each sample), ``m_index_to_metric`` (the distinct values, ascending),
    ``m_index_to_sample`` (for each of these a row of samples) and ``m_index_to_sample_percentile_merged`` (the same in
    about a hundred rows); for a sum only ``m_metric_value``.

    Args:
        num_threads_reduce: Number of threads that write index files, each for one metric at a time.
        specific_threads: Indices of the threads whose shares are measured; empty: all.
        metric_functions: For each metric a function of a batch that returns integers, as tensor or array.
        metric_types: For each metric ``single_value_per_sample`` or ``accumulate_value_over_samples`` (a vector).
        metric_dtypes: Has no effect: index files have the smallest dtype that holds their values.
        custom_map_init: Not supported, like the next three; use a metric function instead.
        custom_map_update: Not supported.
        custom_map_finalize: Not supported.
        custom_reduce: Not supported.
        sample_indices: The index of each sample in the training dataset; None: the same as in ``dataset``. The entry
            ``index`` of a batch that is a mapping replaces it.

    Raises:
        ValueError: The lists of metrics have different lengths, or a type is unknown.
        NotYetSupportedError: A custom function is given.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str | Path = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Any = None,
        custom_map_update: Any = None,
        custom_map_finalize: Any = None,
        custom_reduce: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        customs = (custom_map_init, custom_map_update, custom_map_finalize, custom_reduce)
        if any(custom is not None for custom in customs):
            raise NotYetSupportedError(
                "DataAnalyzer(custom_map_..., custom_reduce): functions that replace steps of the analysis are not "
                "supported; use a metric function, which gets every batch"
            )
        self._source = SampleSource(dataset, batch_size, collate_fn, sample_indices)
        self._metrics = Metrics(metric_names, metric_functions, metric_types)
        self._num_workers, self._worker, self._num_threads = num_workers, worker_id, num_threads
        self._num_threads_reduce = num_threads_reduce
        self._threads = sorted(specific_threads) or range(num_threads)
        self._folder = Path(save_path)

    def run_map(self) -> None:
        """Measures this process's shares and writes the results to ``worker<w>_thread<t>`` of each metric."""
        with ThreadPoolExecutor(len(self._threads)) as pool:
            for done in [pool.submit(self._map, thread) for thread in self._threads]:
                done.result()

    def _map(self, thread: int) -> None:
        share = self._source.share(self._worker * self._num_threads + thread, self._num_workers * self._num_threads)
        for name, collected in zip(self._metrics.names, measure(self._source, share, self._metrics), strict=True):
            path = self._part(name, self._worker, thread)
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".tmp")
            with open(unfinished, "wb") as file:
                arrays: dict[str, Any] = dict(collected.arrays())
                numpy.savez(file, **arrays)
            unfinished.replace(path)  # so that run_reduce finds only complete files

    def _part(self, name: str, worker: int, thread: int) -> Path:
        return self._folder / name / f"worker{worker}_thread{thread}" / _PART

    def run_reduce(self) -> None:
        """Writes the index files from the results of all processes. One process calls it after :meth:`run_map` on all.

        Raises:
            FileNotFoundError: The results of a process are missing.
        """
        with ThreadPoolExecutor(max(self._num_threads_reduce, 1)) as pool:
            pairs = zip(self._metrics.names, self._metrics.kinds, strict=True)
            for done in [pool.submit(self._reduce, name, kind) for name, kind in pairs]:
                done.result()

    def _reduce(self, name: str, kind: str) -> None:
        paths = [self._part(name, w, t) for w in range(self._num_workers) for t in range(self._num_threads)]
        missing = [str(path.parent) for path in paths if not path.exists()]
        if missing:
            raise FileNotFoundError(
                f"run_reduce: expected {len(paths)} parts of the metric {name}, but {len(missing)} are missing "
                f"({', '.join(missing[:3])}); first call run_map in all {self._num_workers} processes"
            )
        parts = []
        for path in paths:
            with numpy.load(path) as part:
                parts.append({key: part[key] for key in part.files})
        write_metric(self._folder / name, name, kind, parts)

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Runs map and reduce. Every rank of ``comm_group`` must call it; rank 0 reduces, and all return together.

        Raises:
            RuntimeError: Another rank could not map, or rank 0 could not reduce.
        """
        is_first = not comm.is_initialized() or comm.get_rank(group=comm_group) == 0
        _run_together(self.run_map, comm_group, "run_map_reduce")
        _run_together(self.run_reduce if is_first else lambda: None, comm_group, "run_map_reduce")


def _run_together(step: Callable[[], Any], group: Any, who: str) -> list[Any]:
    """Calls ``step`` on every rank of ``group``; returns all results, or raises on all of them if it fails on one.

    Without a process group it is called in this process alone. ``who`` names the caller in messages.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = step()
    except Exception as error:  # the other ranks wait for the outcome
        failure = error
    outcomes: list[Any] = [(None if failure is None else repr(failure), result)]
    if comm.is_initialized() and comm.get_world_size(group=group) > 1:
        ranks = axis_of(group).objects(patience=comm.default_timeout(), why=who)
        outcomes = gather_objects(ranks, outcomes[0], label=who)
    if failure is not None:
        raise failure
    for rank, (text, _) in enumerate(outcomes):
        if text is not None:
            raise RuntimeError(f"{who}: rank {rank} could not continue: {text}")
    return [result for _, result in outcomes]


@dataclass(frozen=True)
class Metrics:
    """The metrics that the analyzer computes for every batch."""

    names: Sequence[str]  # the names of the metrics
    functions: Sequence[Callable[[Any], Any]]  # for each metric a function of a batch that returns integers
    kinds: Sequence[str]  # for each metric ``single_value_per_sample`` or ``accumulate_value_over_samples``

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.functions) == len(self.kinds):
            raise ValueError(
                f"metric_names, metric_functions and metric_types: expected equal lengths, found {len(self.names)}, "
                f"{len(self.functions)} and {len(self.kinds)}; give one of each for every metric"
            )
        for name, kind in zip(self.names, self.kinds, strict=True):
            if kind not in KINDS:
                raise ValueError(f"metric {name}: metric_type: expected one of {', '.join(KINDS)}; found {kind!r}")


@dataclass(frozen=True)
class SampleSource:
    """Holds the samples to analyse."""

    dataset: Any  # a map-style dataset
    batch_size: int  # number of samples in a batch
    collate_fn: Callable[[list[Any]], Any] | None = None  # makes a batch from samples; None: torch's
    # the index of each sample in the training dataset; None: the same as in ``dataset``
    sample_indices: Sequence[int] | None = field(default=None)

    def share(self, number: int, of: int) -> range:
        """Returns the samples of share ``number`` of ``of`` equal shares."""
        count = len(self.dataset)
        return range(count * number // of, count * (number + 1) // of)


def measure(source: SampleSource, share: range, metrics: Metrics) -> list[MetricValues]:
    """Computes every metric of the samples of a share.

    The samples of a batch that is a mapping with ``index`` are those of this entry.
    """
    found = [MetricValues(kind) for kind in metrics.kinds]
    part = Subset(source.dataset, share)
    start = share.start
    for batch in DataLoader(part, batch_size=source.batch_size, collate_fn=source.collate_fn):
        count = min(source.batch_size, share.stop - start)
        samples = _sample_indices(source, batch, start, count)
        for name, function, kind, collected in zip(metrics.names, metrics.functions, metrics.kinds, found, strict=True):
            result = function(batch)
            collected.add(result, samples if kind == SINGLE else samples[:0], name)
        start += count
    return found


def _sample_indices(source: SampleSource, batch: Any, start: int, count: int) -> numpy.typing.NDArray[numpy.int64]:
    if isinstance(batch, Mapping) and "index" in batch:
        return numpy.asarray(batch["index"], dtype=numpy.int64).reshape(count, -1)[:, 0]
    if source.sample_indices is not None:
        return numpy.asarray(source.sample_indices[start : start + count], dtype=numpy.int64)
    return numpy.arange(start, start + count)


class DistributedDataAnalyzer:
    """Measures every sample of a dataset; the files are those of :class:`~deepspeed.data.analysis.DataAnalyzer`.

    Args:
        num_workers: Number of shares, one per rank; None or 1: the number of ranks.
        num_threads: Has no effect: a rank uses one thread.
        worker_id: Index of the share; None or 0: the rank.
        save_path: Folder of the results, which rank 0 writes.
        device: Has no effect: batches stay on the dataset's device.

    Raises:
        ValueError: ``num_workers`` is not the number of ranks, or ``worker_id`` is not this rank.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int | None = None,
        num_threads: int = 1,
        worker_id: int | None = None,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str | Path = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: Any = None,
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        self._source = SampleSource(dataset, batch_size, collate_fn, sample_indices)
        self._metrics = Metrics(metric_names, metric_functions, metric_types)
        self._group, self._folder = comm_group, Path(save_path)
        is_distributed = comm.is_initialized()
        ranks = comm.get_world_size(group=comm_group) if is_distributed else 1
        if num_workers not in (None, 1, ranks):
            raise ValueError(
                f"DistributedDataAnalyzer(num_workers={num_workers}): expected {ranks}, as every rank is a worker; "
                "leave it out"
            )
        self._ranks, self._rank = ranks, comm.get_rank(group=comm_group) if is_distributed else 0
        if worker_id not in (None, 0, self._rank):
            raise ValueError(
                f"DistributedDataAnalyzer(worker_id={worker_id}): expected {self._rank}, the rank; leave it out"
            )

    def run_map_reduce(self) -> None:
        """Measures all samples and writes the index files. Every rank of the group must call it; all return together.

        Raises:
            RuntimeError: Another rank failed; the rank that failed raises its own error.
        """

        def measured() -> list[dict[str, NDArray[Any]]]:
            share = self._source.share(self._rank, self._ranks)
            return [each.arrays() for each in measure(self._source, share, self._metrics)]

        gathered = _run_together(measured, self._group, "DistributedDataAnalyzer")

        def write() -> None:
            for number, (name, kind) in enumerate(zip(self._metrics.names, self._metrics.kinds, strict=True)):
                write_metric(self._folder / name, name, kind, [part[number] for part in gathered])

        _run_together(write if self._rank == 0 else lambda: None, self._group, "DistributedDataAnalyzer")


SINGLE, SUM = "single_value_per_sample", "accumulate_value_over_samples"
KINDS = (SINGLE, SUM)


class MetricValues:
    """Collects the values of one metric, or their sum, for the samples of one share."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._values: list[NDArray[Any]] = []
        self._samples: list[NDArray[numpy.int64]] = []
        self._sum: NDArray[Any] | None = None

    def add(self, result: Any, samples: NDArray[numpy.int64], name: str) -> None:
        """Adds a batch's result: ``[samples]`` integers, or for a sum a vector. ValueError for other shapes."""
        values = numpy.asarray(result.cpu() if hasattr(result, "cpu") else result)
        if not numpy.issubdtype(values.dtype, numpy.integer):
            raise ValueError(f"metric {name}: expected integers from its function, found {values.dtype}; round them")
        if self.kind == SUM:
            if self._sum is not None and self._sum.shape != values.shape:
                raise ValueError(
                    f"metric {name}: expected vectors of one shape, found {self._sum.shape} and {values.shape}"
                )
            self._sum = values.astype(numpy.int64) if self._sum is None else self._sum + values
            return
        values = values.reshape(-1)
        if len(values) != len(samples):
            raise ValueError(
                f"metric {name}: its function gave {len(values)} values for a batch of {len(samples)} samples; return "
                f"one for each, or use another metric_type than {SINGLE}"
            )
        self._values.append(values)
        self._samples.append(samples)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns the collected values as int64 arrays: ``sum``, or ``values`` and ``samples``."""
        if self.kind == SUM:
            return {"sum": self._sum if self._sum is not None else numpy.empty(0, numpy.int64)}
        empty = numpy.empty(0, numpy.int64)
        return {
            "values": numpy.concatenate([empty, *self._values]).astype(numpy.int64),
            "samples": numpy.concatenate([empty, *self._samples]),
        }


def write_metric(folder: Path, name: str, kind: str, parts: Sequence[dict[str, NDArray[Any]]]) -> None:
    """Writes a metric's index files from the arrays of each share; ValueError where a sample was measured twice."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == SUM:
        sums = [part["sum"] for part in parts if part["sum"].size]
        total = numpy.sum(sums, axis=0) if sums else numpy.empty(0, numpy.int64)
        _write(folder / f"{name}_metric_value", total.reshape(-1), numpy.array([total.size]))
        return
    values = numpy.concatenate([part["values"] for part in parts])
    samples = numpy.concatenate([part["samples"] for part in parts])
    # By value, and within one value by index.
    order = numpy.lexsort((samples, values))
    by_value, ids = values[order], samples[order]
    distinct, counts = numpy.unique(by_value, return_counts=True)
    by_sample = numpy.argsort(samples, kind="stable")
    repeated = numpy.flatnonzero(numpy.diff(samples[by_sample]) == 0)
    if len(repeated):
        raise ValueError(
            f"metric {name}: sample {samples[by_sample][repeated[0]]} was analyzed more than once; give each "
            "sample its own number in the batches' `index`, or in sample_indices"
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
