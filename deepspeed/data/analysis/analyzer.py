"""Analysis of a dataset by independent processes: each maps its shares to files, one reduces them to index files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy

from deepspeed import comm
from deepspeed.data.analysis.metrics import write_metric
from deepspeed.data.analysis.walk import Metrics, SampleSource, walk
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
        worker_id: Which of them this is.
        num_threads: Shares of one process, gone through at the same time by threads.
        num_threads_reduce: Threads that write index files, metric by metric.
        specific_threads: Only these shares of the process, from 0; empty: all.
        batch_size: Samples given to a metric function at a time.
        metric_names: Of the metrics.
        metric_functions: For each a function of a batch that gives integers, as tensor or array.
        metric_types: For each ``single_value_per_sample`` or ``accumulate_value_over_samples`` (a vector).
        metric_dtypes: Accepted for programs of old: index files have the smallest type that holds their values.
        save_path: Folder of the results.
        collate_fn: Makes a batch of samples; None: torch's.
        custom_map_init: Not supported, as the next three are not: what they would do is a metric function.
        custom_map_update: Not supported.
        custom_map_finalize: Not supported.
        custom_reduce: Not supported.
        sample_indices: The number of each sample in the dataset that is trained on; None: as here. Batches that are
            mappings with ``index`` say it by themselves.

    Raises:
        ValueError: The lists of metrics have different lengths, or a type is unknown.
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
        """Measures this process's shares and leaves what it found in ``worker<w>_thread<t>`` of each metric."""
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
            unfinished.replace(path)  # who reduces sees whole parts only

    def _part(self, name: str, worker: int, thread: int) -> Path:
        return self._folder / name / f"worker{worker}_thread{thread}" / _PART

    def run_reduce(self) -> None:
        """Makes the index files of what all processes have left. One process calls it, when all have mapped.

        Raises:
            FileNotFoundError: Some process has not.
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
        """Both. With a process group every rank of it calls this, and rank 0 of it reduces; all return together.

        Args:
            comm_group: Process group of the workers; None: all ranks.

        Raises:
            RuntimeError: Rank 0 could not reduce; on the other ranks.
        """
        self.run_map()
        if not comm.is_initialized():
            self.run_reduce()
            return
        comm.barrier(group=comm_group)
        failure: list[Exception] = []
        if comm.get_rank(group=comm_group) == 0:
            try:
                self.run_reduce()
            except Exception as error:  # the others wait: all must hear of it
                failure.append(error)
        failures: list[Any] = [None] * comm.get_world_size(group=comm_group)
        comm.all_gather_object(failures, repr(failure[0]) if failure else None, group=comm_group)
        if failure:
            raise failure[0]
        if failures[0] is not None:
            raise RuntimeError(f"run_map_reduce: rank 0 could not reduce: {failures[0]}")
