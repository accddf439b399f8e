"""Analysis of a dataset by independent processes: each maps its shares to files, one reduces them to index files."""

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
from deepspeed.data.indexed.dataset import write_dataset
from deepspeed.data.indexed.format import smallest_type
from deepspeed.errors import NotYetSupportedError

_PART = "collected.npz"


class DataAnalyzer:
    """Measures every sample of a dataset, for curricula and for batches by length.

    Each of ``num_workers`` processes calls :meth:`run_map`, on any machine that sees ``save_path``; then one calls
    :meth:`run_reduce`. For a metric ``m`` it leaves, below ``save_path/m``, indexed datasets
    (:mod:`deepspeed.data.indexed`): ``m_sample_to_metric`` (the value of each sample), ``m_index_to_metric`` (the
    distinct values, rising), ``m_index_to_sample`` (for each of them a row of samples) and
    ``m_index_to_sample_percentile_merged`` (the same in about a hundred rows); for a sum only ``m_metric_value``.

    Args:
        dataset: Samples by number.
        num_workers: Processes that share the work.
        worker_id: Number of this process.
        num_threads: Threads of this process, each with a share of the samples.
        num_threads_reduce: Threads that write index files, metric by metric.
        specific_threads: Only these shares of the process, from 0; empty: all.
        batch_size: Samples given to a metric function at a time.
        metric_names: The names of the metrics.
        metric_functions: For each metric a function of a batch that returns integers, as tensor or array.
        metric_types: For each metric ``single_value_per_sample`` or ``accumulate_value_over_samples`` (a vector).
        metric_dtypes: Accepted without effect: index files have the smallest type that holds their values.
        save_path: Folder of the results.
        collate_fn: Makes a batch from samples; None: torch's.
        custom_map_init: Not supported, like the next three; use a metric function instead.
        custom_map_update: Not supported.
        custom_map_finalize: Not supported.
        custom_reduce: Not supported.
        sample_indices: The index of each sample in the training dataset; None: the same as here. Batches that are
            mappings with ``index`` list them themselves.

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
                "DataAnalyzer(custom_map_..., custom_reduce): functions that replace the steps of the analysis are not "
                "supported; write a metric function, which sees every batch"
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
        for name, collected in zip(self._metrics.names, walk(self._source, share, self._metrics), strict=True):
            path = self._part(name, self._worker, thread)
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".tmp")
            with open(unfinished, "wb") as file:
                arrays: dict[str, Any] = dict(collected.arrays())
                numpy.savez(file, **arrays)
            unfinished.replace(path)  # run_reduce then sees complete files only

    def _part(self, name: str, worker: int, thread: int) -> Path:
        return self._folder / name / f"worker{worker}_thread{thread}" / _PART

    def run_reduce(self) -> None:
        """Writes the index files from the results of all processes. One process calls it after all have run the map.

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
                f"run_reduce: {len(missing)} of {len(paths)} parts of the metric {name} are not there yet "
                f"({', '.join(missing[:3])}); run_map must end in all {self._num_workers} processes first"
            )
        parts = []
        for path in paths:
            with numpy.load(path) as part:
                parts.append({key: part[key] for key in part.files})
        write_metric(self._folder / name, name, kind, parts)

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Runs map and reduce. Every rank of a process group must call it; rank 0 reduces, and all return together.

        Args:
            comm_group: Process group of the workers; None: all ranks.

        Raises:
            RuntimeError: Another rank could not map, or rank 0 could not reduce.
        """
        if not comm.is_initialized():
            self.run_map()
            self.run_reduce()
            return
        _run_together(self.run_map, comm_group)
        _run_together(self.run_reduce if comm.get_rank(group=comm_group) == 0 else lambda: None, comm_group)


def _run_together(step: Callable[[], None], group: Any) -> None:
    """Calls ``step`` on every rank of ``group``; raises on all of them if it fails on one."""
    failure: Exception | None = None
    try:
        step()
    except Exception as error:  # the other ranks wait for the outcome
        failure = error
    failures: list[Any] = [None] * comm.get_world_size(group=group)
    comm.all_gather_object(failures, None if failure is None else repr(failure), group=group)
    if failure is not None:
        raise failure
    for rank, text in enumerate(failures):
        if text is not None:
            raise RuntimeError(f"run_map_reduce: rank {rank} could not continue: {text}")


@dataclass(frozen=True)
class Metrics:
    """The metrics that the analyzer computes for every batch.

    Attributes:
        names: The names of the metrics.
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
                raise ValueError(f"metric {name}: metric_type {kind!r} is unknown; use one of {', '.join(KINDS)}")


@dataclass(frozen=True)
class SampleSource:
    """Holds the samples to analyse.

    Attributes:
        dataset: Samples by number.
        batch_size: Samples at a time.
        collate_fn: Makes a batch from samples; None: torch's.
        sample_indices: The index of each sample in the training dataset; None: the same as here.
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
    """Computes every metric of the samples of a share.

    The number of samples is that of a metric's rows, not of a batch's fields. A batch that is a mapping with
    ``index`` lists its samples itself.
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


class DistributedDataAnalyzer:
    """Measures every sample of a dataset; the files are those of :class:`~deepspeed.data.analysis.DataAnalyzer`.

    Args:
        dataset: Samples by number.
        num_workers: Number of shares, one per rank; None: the number of ranks.
        num_threads: Accepted without effect: a rank uses one thread.
        worker_id: Number of the share; None: the rank.
        batch_size: Samples given to a metric function at a time.
        metric_names: The names of the metrics.
        metric_functions: For each metric a function of a batch that returns integers, as tensor or array.
        metric_types: For each metric ``single_value_per_sample`` or ``accumulate_value_over_samples`` (a vector).
        save_path: Folder of the results, which rank 0 writes.
        collate_fn: Makes a batch from samples; None: torch's.
        device: Accepted without effect: batches stay on the dataset's device.
        comm_group: Process group; None: all ranks.
        sample_indices: The index of each sample in the training dataset; None: the same as here.

    Raises:
        ValueError: ``num_workers`` is not the number of ranks, or ``worker_id`` not this rank.
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
        there = comm.is_initialized()
        ranks = comm.get_world_size(group=comm_group) if there else 1
        if num_workers not in (None, 1, ranks):
            raise ValueError(
                f"DistributedDataAnalyzer(num_workers={num_workers}): every rank is a worker, so expected {ranks}; "
                "leave it out"
            )
        self._ranks, self._rank = ranks, comm.get_rank(group=comm_group) if there else 0
        if worker_id not in (None, 0, self._rank):
            raise ValueError(
                f"DistributedDataAnalyzer(worker_id={worker_id}): expected {self._rank}, the rank; leave it out"
            )

    def run_map_reduce(self) -> None:
        """Measures, and writes the index files. Every rank of the group must call it; all return together.

        Raises:
            RuntimeError: A rank failed; raised on all ranks.
        """
        failure: Exception | None = None
        found: Any = None
        try:
            share = self._source.share(self._rank, self._ranks)
            found = [each.arrays() for each in walk(self._source, share, self._metrics)]
        except Exception as error:  # the other ranks wait for the outcome
            failure, found = error, repr(error)
        gathered = self._gather(found)
        self._raise_if(failure, gathered)
        if self._rank == 0:
            try:
                for number, (name, kind) in enumerate(zip(self._metrics.names, self._metrics.kinds, strict=True)):
                    write_metric(self._folder / name, name, kind, [part[number] for part in gathered])
            except Exception as error:
                failure = error
        self._raise_if(failure, self._gather(repr(failure) if failure else None))

    def _gather(self, value: Any) -> list[Any]:
        if self._ranks == 1:
            return [value]
        gathered: list[Any] = [None] * self._ranks
        comm.all_gather_object(gathered, value, group=self._group)
        return gathered

    @staticmethod
    def _raise_if(failure: Exception | None, gathered: list[Any]) -> None:
        if failure is not None:
            raise failure
        for rank, answer in enumerate(gathered):
            if isinstance(answer, str):
                raise RuntimeError(f"DistributedDataAnalyzer: rank {rank} could not continue: {answer}")


SINGLE, SUM = "single_value_per_sample", "accumulate_value_over_samples"
KINDS = (SINGLE, SUM)


class MetricValues:
    """The values of one metric for the samples of one share.

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
        """Adds the result of a metric function for a batch.

        Args:
            answer: A tensor or array of integers.
            samples: The numbers of the batch's samples; for a single value as many as the answer has rows.
            name: The name of the metric.

        Raises:
            ValueError: The result is not one integer per sample, or the lengths of vectors differ.
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
        """Returns the collected values as arrays, to send or save."""
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
        name: The name of the metric.
        kind: The kind of the metric.
        parts: The values of each share.

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
