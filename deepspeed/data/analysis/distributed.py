"""Analysis of a dataset by the ranks of one job, which keep what they find in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepspeed import comm
from deepspeed.data.analysis.metrics import write_metric
from deepspeed.data.analysis.walk import Metrics, SampleSource, walk


class DistributedDataAnalyzer:
    """Measures every sample of a dataset; the files are those of :class:`~deepspeed.data.analysis.DataAnalyzer`.

    Args:
        dataset: Samples by number.
        num_workers: Shares; None: as many as ranks. Each rank goes through one.
        num_threads: Accepted for programs of old: a rank goes through its share by itself.
        worker_id: Which share; None: that of the rank.
        batch_size: Samples given to a metric function at a time.
        metric_names: Of the metrics.
        metric_functions: For each a function of a batch that gives integers, as tensor or array.
        metric_types: For each ``single_value_per_sample`` or ``accumulate_value_over_samples`` (a vector).
        save_path: Folder of the results, which rank 0 writes.
        collate_fn: Makes a batch of samples; None: torch's.
        device: Accepted for programs of old: batches stay where the dataset made them.
        comm_group: Process group; None: all ranks.
        sample_indices: The number of each sample in the dataset that is trained on; None: as here.
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
            RuntimeError: A rank could not; all raise.
        """
        failure: Exception | None = None
        found: Any = None
        try:
            share = self._source.share(self._rank, self._ranks)
            found = [each.arrays() for each in walk(self._source, share, self._metrics)]
        except Exception as error:  # the others wait: all must hear of it
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
                raise RuntimeError(f"DistributedDataAnalyzer: rank {rank} could not go on: {answer}")
