"""Draws batches of samples that the curriculum allows, identically on all ranks from one seed.

Every rank draws the whole global batch and takes its share, without communication. A *cluster* has the samples that the
curriculum allowed at the same step. Seed, cluster and number of the pass determine the order of its samples, so the
state is only that of the generator, and the position in each cluster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from torch.utils.data import BatchSampler

from deepspeed.config.data_rules import check_data_efficiency
from deepspeed.config.messages import ConfigMessages
from deepspeed.config.parsing import parse_section
from deepspeed.config.sections.data_efficiency import DataEfficiency
from deepspeed.data.curriculum.scheduler import CurriculumScheduler, settings_of
from deepspeed.data.indexed.dataset import MMapIndexedDataset
from deepspeed.logging import log_dist

_MAX_STATES = 1024  # micro-batches that workers may have read ahead of training


class DeepSpeedDataSampler(BatchSampler):
    """Yields the micro-batches of one rank by ``data_efficiency.data_sampling``; a batch sampler for ``DataLoader``.

    Args:
        data_parallel_group: Has no effect: all ranks draw the same batch.
        global_rank: Has no effect.
        drop_last: End before a micro-batch that would exceed ``num_epochs`` passes; False: yield it too, with further
            samples.

    Attributes:
        consumed_samples: Number of samples yielded so far, over all ranks.
        curriculum_step: Number of global batches drawn so far.
        current_difficulties: Difficulty of the latest global batch by metric.
        micro_batches: Number of micro-batches yielded so far.

    Raises:
        DeepSpeedConfigError: The section cannot be used.
        ValueError: The dataset is empty, or the index files do not fit it.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any] | DataEfficiency,
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any = None,
        gradient_accumulation_steps: int = 1,
        global_rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        section = _read(data_efficiency_config)
        sampling = section.data_sampling
        self._seed = section.seed
        self._micro, self._rank = micro_batch_size, data_parallel_rank
        self._micro_of_all = micro_batch_size * data_parallel_size
        self._batch_of_all = self._micro_of_all * gradient_accumulation_steps
        self._num_samples = one_epoch_total_samples
        self._total = one_epoch_total_samples * sampling.num_epochs
        self.drop_last = drop_last
        if one_epoch_total_samples < 1:
            raise ValueError("DeepSpeedDataSampler: expected a dataset with samples, found none; give another one")
        learning = sampling.curriculum_learning
        metrics = learning.curriculum_metrics if sampling.enabled and learning.enabled else {}
        self._schedules = {name: CurriculumScheduler(settings_of(metric)) for name, metric in metrics.items()}
        self._metrics = [
            MetricOrder.read(
                name,
                str(metric.index_to_sample_path),
                metric.index_to_metric_path,
                metric.max_difficulty if metric.difficulty_type == "percentile" else None,
            )
            for name, metric in metrics.items()
            if metric.clustering_type != "single_cluster"
        ]
        self._generator = numpy.random.default_rng(self._seed)
        self._reset_clusters()
        self._remaining: list[int] = []  # samples of the latest global batch that were not returned yet
        self.consumed_samples = self.curriculum_step = self.micro_batches = 0
        self.current_difficulties: dict[str, int] = {}
        self._states: deque[dict[str, Any]] = deque([self._state()], maxlen=_MAX_STATES)

    def _reset_clusters(self) -> None:
        self._clusters = Clusters(self._metrics, self._num_samples)
        self._orders: list[NDArray[Any]] = []
        self._positions: list[int] = []
        self._passes: list[int] = []

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Sets the functions of the step for metrics with a ``custom`` schedule.

        Raises:
            ValueError: The curriculum has no such metric.
        """
        for name, function in schedule_func_dict.items():
            if name not in self._schedules:
                known = ", ".join(self._schedules) or "none"
                raise ValueError(
                    f"set_custom_curriculum_learning_schedule: expected one of the metrics {known}; found {name!r}"
                )
            self._schedules[name].set_custom_get_difficulty(function)

    def __len__(self) -> int:
        """Returns the number of micro-batches of a whole training."""
        return self._total // self._micro_of_all if self.drop_last else -(-self._total // self._micro_of_all)

    def __iter__(self) -> Iterator[list[int]]:
        while self.consumed_samples + (self._micro_of_all if self.drop_last else 1) <= self._total:
            while len(self._remaining) < self._micro_of_all:
                self._remaining += self._draw()
            batch, self._remaining = self._remaining[: self._micro_of_all], self._remaining[self._micro_of_all :]
            self.consumed_samples += len(batch)
            self.micro_batches += 1
            self._states.append(self._state())
            yield batch[self._rank * self._micro : (self._rank + 1) * self._micro]

    # -- drawing -----------------------------------------------------------------------------------------------------

    def _draw(self) -> list[int]:
        self.curriculum_step += 1
        difficulties = {name: each.update_difficulty(self.curriculum_step) for name, each in self._schedules.items()}
        if difficulties != self.current_difficulties or not self._clusters.members:
            self._clusters.grow(difficulties)
            for cluster in range(len(self._orders), len(self._clusters.members)):
                self._positions.append(0)
                self._passes.append(0)
                self._orders.append(self._shuffled(cluster))
        self.current_difficulties = difficulties
        sizes = self._clusters.sizes()
        counts = self._generator.multinomial(self._batch_of_all, sizes / sizes.sum())
        batch = numpy.concatenate([self._take(cluster, int(count)) for cluster, count in enumerate(counts)])
        self._generator.shuffle(batch)
        return [int(sample) for sample in batch]

    def _shuffled(self, cluster: int) -> NDArray[Any]:
        generator = numpy.random.default_rng([self._seed, cluster, self._passes[cluster]])
        return generator.permutation(self._clusters.members[cluster])

    def _take(self, cluster: int, count: int) -> NDArray[Any]:
        """Returns the next sample indices of a cluster; reshuffles it each time all its samples have been drawn."""
        taken: list[NDArray[Any]] = [self._orders[cluster][:0]]
        while count > 0:
            start = self._positions[cluster]
            part = self._orders[cluster][start : start + count]
            taken.append(part)
            count -= len(part)
            self._positions[cluster] += len(part)
            if self._positions[cluster] == len(self._orders[cluster]):
                self._passes[cluster] += 1
                self._positions[cluster] = 0
                self._orders[cluster] = self._shuffled(cluster)
        return numpy.concatenate(taken)

    # -- state -------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {
            "batch": list(self._remaining),
            "consumed_samples": self.consumed_samples,
            "curriculum_step": self.curriculum_step,
            "current_difficulties": dict(self.current_difficulties),
            "data_cluster_bounds": [dict(bounds) for bounds in self._clusters.bounds],
            "data_cluster_current_position": list(self._positions),
            "data_cluster_passes": list(self._passes),
            "micro_batches": self.micro_batches,
            "np_rng_state": self._generator.bit_generator.state,
        }

    def state_dict(self, micro_batches: int | None = None) -> dict[str, Any]:
        """Returns the position, equal on all ranks, as numbers, strings, lists and dicts.

        ``micro_batches``: after this many, for readers that prefetch; None: the present position.

        Raises:
            ValueError: The state after ``micro_batches`` is not kept any more.
        """
        if micro_batches is None:
            return self._state()
        for state in reversed(self._states):
            if state["micro_batches"] == micro_batches:
                return state
        raise ValueError(
            f"DeepSpeedDataSampler: expected one of the last {_MAX_STATES} states up to micro-batch "
            f"{self.micro_batches}, found micro-batch {micro_batches}; older states are not kept"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the position of :meth:`state_dict`, for any number of ranks and batch size.

        A state of upstream's package does not have the generator's state; then the curriculum continues at its step
        with other random draws, and this is logged.
        """
        self._reset_clusters()
        self.consumed_samples = int(state_dict["consumed_samples"])
        self.curriculum_step = int(state_dict["curriculum_step"])
        self._remaining = []
        self.micro_batches = int(state_dict.get("micro_batches", 0))
        self.current_difficulties = {}
        if "data_cluster_bounds" in state_dict:
            for bounds in state_dict["data_cluster_bounds"]:
                self._clusters.grow(bounds)
            self._positions = list(state_dict["data_cluster_current_position"])
            self._passes = list(state_dict["data_cluster_passes"])
            self._orders = [self._shuffled(cluster) for cluster in range(len(self._positions))]
            self._generator.bit_generator.state = state_dict["np_rng_state"]
            self._remaining = list(state_dict["batch"])
            self.current_difficulties = dict(state_dict["current_difficulties"])
        else:
            log_dist(
                f"data sampler: the saved state was written by upstream's package; the curriculum continues at step "
                f"{self.curriculum_step}, with other random draws"
            )
        self._states.clear()
        self._states.append(self._state())


def _read(config: Mapping[str, Any] | DataEfficiency) -> DataEfficiency:
    if isinstance(config, DataEfficiency):  # parsed and checked already
        return config
    section = parse_section({"data_efficiency": dict(config)}, "data_efficiency")
    assert isinstance(section, DataEfficiency)
    findings = ConfigMessages({}, {}, None)
    check_data_efficiency(section, findings)
    findings.raise_if_any()
    return section


@dataclass(frozen=True, eq=False)
class MetricOrder:
    """Orders the samples of a dataset by one metric, easiest first."""

    name: str  # name of the metric
    samples: NDArray[Any]
    values: NDArray[Any] | None  # its distinct values, ascending, 1-D; None: difficulties are percentiles
    ends: NDArray[numpy.int64]  # for each value, the number of samples with it or a lower one
    # the percentile that stands for all samples; None: difficulties are values of the metric
    max_difficulty: int | None = None

    @classmethod
    def read(
        cls, name: str, sample_path: str | Path, metric_path: str | Path | None, max_difficulty: int | None
    ) -> MetricOrder:
        """Reads the index files that an analysis has written (:mod:`deepspeed.data.analysis`).

        Args:
            sample_path: ``..._index_to_sample``: for each value a row of samples.
            metric_path: ``..._index_to_metric``: the values; not needed for percentiles.

        Raises:
            ValueError: The two files do not belong together.
        """
        rows = MMapIndexedDataset(sample_path)
        ends = numpy.cumsum(rows.sizes, dtype=numpy.int64)
        values = None
        if max_difficulty is None:
            assert metric_path is not None
            values = MMapIndexedDataset(metric_path).values
            if len(values) != len(rows):
                raise ValueError(
                    f"index files of the metric {name}: expected as many rows as values, found {len(rows)} rows of "
                    f"samples in {sample_path} and {len(values)} values in {metric_path}; analyze the dataset again"
                )
        return cls(name, rows.values, values, ends, max_difficulty)

    def allowed(self, difficulty: int) -> int:
        """Returns the number of samples, from the easiest on, that a difficulty allows."""
        if self.max_difficulty is not None:
            per_percentile = len(self.samples) // self.max_difficulty
            return len(self.samples) if difficulty >= self.max_difficulty else per_percentile * difficulty
        assert self.values is not None
        rows = int(numpy.searchsorted(self.values, difficulty, side="right"))
        return int(self.ends[rows - 1]) if rows else 0

    def least(self) -> str:
        """Returns the lowest difficulty that allows a sample, for messages."""
        most = self.max_difficulty
        if most is not None and len(self.samples) < most:
            return f"percentile {most}, since {len(self.samples)} samples are too few for {most} percentiles"
        if self.values is None:
            return "percentile 1"
        return str(self.values[0]) if len(self.values) else "none, as the index is empty"


class Clusters:
    """Groups samples by the step at which the curriculum first allowed them; without metrics all are in one group."""

    def __init__(self, metrics: list[MetricOrder], num_samples: int) -> None:
        self._metrics = metrics
        self._num_samples = num_samples
        self._taken = numpy.zeros(num_samples if len(metrics) > 1 else 0, dtype=bool)
        self._before = 0  # samples allowed so far, if there is only one metric
        self.members: list[NDArray[Any]] = []  # the indices of the samples of each group
        self.bounds: list[dict[str, int]] = []  # the difficulties at which each group was added

    def grow(self, difficulties: Mapping[str, int]) -> None:
        """Adds a group of newly allowed samples; ValueError where none is allowed, or the dataset lacks one."""
        fresh = self._fresh(difficulties)
        if len(fresh):
            if int(fresh.max()) >= self._num_samples:
                raise ValueError(
                    f"index of the metric(s) {', '.join(m.name for m in self._metrics)}: expected samples below "
                    f"{self._num_samples}, the size of the dataset, found {int(fresh.max())}; analyze it again"
                )
            self.members.append(fresh)
            self.bounds.append(dict(difficulties))
        elif not self.members:
            levels = ", ".join(
                f"{m.name} {difficulties[m.name]} (the easiest sample: {m.least()})" for m in self._metrics
            )
            raise ValueError(f"the curriculum allows no sample at {levels}; raise min_difficulty")

    def _fresh(self, difficulties: Mapping[str, int]) -> NDArray[Any]:
        if not self._metrics:
            return numpy.arange(0 if self.members else self._num_samples)
        if len(self._metrics) == 1:
            (metric,) = self._metrics
            before, now = self._before, metric.allowed(difficulties[metric.name])
            self._before = max(before, now)
            return metric.samples[before:now]
        allowed_by = numpy.zeros(self._num_samples, dtype=numpy.uint8)
        for metric in self._metrics:
            allowed_by[metric.samples[: metric.allowed(difficulties[metric.name])]] += 1
        fresh = numpy.flatnonzero((allowed_by == len(self._metrics)) & ~self._taken)
        self._taken[fresh] = True
        return fresh

    def sizes(self) -> NDArray[numpy.int64]:
        """Returns the number of samples in each group, ``[groups]``."""
        return numpy.array([len(members) for members in self.members], dtype=numpy.int64)
