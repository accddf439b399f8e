"""Batches of samples that the curriculum allows, drawn alike on all ranks from one seed.

Every rank draws the whole global batch and takes its share, so nothing is sent. The samples of a *cluster*, allowed
together, come in an order that follows from the seed, the cluster and the pass through it; so the state is a few
numbers: those of the generator, and where each cluster stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
from numpy.typing import NDArray
from torch.utils.data import BatchSampler

from deepspeed.config.data_rules import check_data_efficiency
from deepspeed.config.messages import ConfigMessages
from deepspeed.config.sections.data_efficiency import DataEfficiency
from deepspeed.config.single import parse_section
from deepspeed.data.curriculum.clusters import Clusters, MetricOrder
from deepspeed.data.curriculum.scheduler import CurriculumScheduler, settings_of
from deepspeed.logging import log_dist

_REMEMBERED = 1024  # micro-batches that workers may have been given ahead of training


class DeepSpeedDataSampler(BatchSampler):
    """The batches of one rank under ``data_efficiency.data_sampling``; a batch sampler of torch's ``DataLoader``.

    Args:
        data_efficiency_config: The section, as a dict or read.
        one_epoch_total_samples: Samples of the dataset.
        micro_batch_size: Samples of one forward on one rank.
        data_parallel_rank: This rank among those that divide the data.
        data_parallel_size: How many they are.
        data_parallel_group: Not needed: the ranks draw alike.
        gradient_accumulation_steps: Micro-batches of one update.
        global_rank: Not needed.
        drop_last: End before a batch that would go beyond ``num_epochs`` passes; otherwise it is filled up, and is the
            last.

    Attributes:
        consumed_samples: Samples given so far to all ranks together.
        curriculum_step: Global batches drawn so far.
        current_difficulties: By metric, of the batch drawn last.
        micro_batches: Micro-batches given so far.

    Raises:
        DeepSpeedConfigError: The section is wrong.
        ValueError: The index files do not fit the dataset.
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
        self._micro, self._rank, self._ranks = micro_batch_size, data_parallel_rank, data_parallel_size
        self._micro_of_all = micro_batch_size * data_parallel_size
        self._batch_of_all = self._micro_of_all * gradient_accumulation_steps
        self._num_samples = one_epoch_total_samples
        self._total = one_epoch_total_samples * sampling.num_epochs
        self.drop_last = drop_last
        if one_epoch_total_samples < 1:
            raise ValueError("DeepSpeedDataSampler: the dataset has no sample")
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
        self._dice = numpy.random.default_rng(self._seed)
        self._forget_clusters()
        self._waiting: list[int] = []  # samples of the global batch drawn last that were not given yet
        self.consumed_samples = self.curriculum_step = self.micro_batches = 0
        self.current_difficulties: dict[str, int] = {}
        self._states: deque[dict[str, Any]] = deque([self._state()], maxlen=_REMEMBERED)

    def _forget_clusters(self) -> None:
        self._clusters = Clusters(self._metrics, self._num_samples)
        self._orders: list[NDArray[Any]] = []
        self._positions: list[int] = []
        self._passes: list[int] = []

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Gives metrics with a ``custom`` schedule their functions of the step.

        Raises:
            ValueError: There is no such metric.
        """
        for name, function in schedule_func_dict.items():
            if name not in self._schedules:
                known = ", ".join(self._schedules) or "none"
                raise ValueError(f"set_custom_curriculum_learning_schedule: no metric {name}; there are: {known}")
            self._schedules[name].set_custom_get_difficulty(function)

    def __len__(self) -> int:
        """Micro-batches of a whole training."""
        return self._total // self._micro_of_all if self.drop_last else -(-self._total // self._micro_of_all)

    def __iter__(self) -> Iterator[list[int]]:
        while self.consumed_samples + (self._micro_of_all if self.drop_last else 1) <= self._total:
            while len(self._waiting) < self._micro_of_all:
                self._waiting += self._draw()
            given, self._waiting = self._waiting[: self._micro_of_all], self._waiting[self._micro_of_all :]
            self.consumed_samples += len(given)
            self.micro_batches += 1
            self._states.append(self._state())
            yield given[self._rank * self._micro : (self._rank + 1) * self._micro]

    # -- drawing -----------------------------------------------------------------------------------------------------

    def _draw(self) -> list[int]:
        """Returns the next global batch."""
        self.curriculum_step += 1
        difficulties = {name: each.update_difficulty(self.curriculum_step) for name, each in self._schedules.items()}
        if difficulties != self.current_difficulties or not self._clusters.members:
            self._clusters.grow(difficulties)
            self._open_clusters()
        self.current_difficulties = difficulties
        sizes = self._clusters.sizes()
        counts = self._dice.multinomial(self._batch_of_all, sizes / sizes.sum())
        batch = numpy.concatenate([self._take(cluster, int(count)) for cluster, count in enumerate(counts)])
        self._dice.shuffle(batch)
        return [int(sample) for sample in batch]

    def _open_clusters(self) -> None:
        for cluster in range(len(self._orders), len(self._clusters.members)):
            self._positions.append(0)
            self._passes.append(0)
            self._orders.append(self._shuffled(cluster))

    def _shuffled(self, cluster: int) -> NDArray[Any]:
        dice = numpy.random.default_rng([self._seed, cluster, self._passes[cluster]])
        return dice.permutation(self._clusters.members[cluster])

    def _take(self, cluster: int, count: int) -> NDArray[Any]:
        """Returns the next samples of a cluster, which is shuffled anew whenever it is used up."""
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
            "batch": list(self._waiting),
            "consumed_samples": self.consumed_samples,
            "curriculum_step": self.curriculum_step,
            "current_difficulties": dict(self.current_difficulties),
            "data_cluster_bounds": [dict(bounds) for bounds in self._clusters.bounds],
            "data_cluster_current_position": list(self._positions),
            "data_cluster_passes": list(self._passes),
            "micro_batches": self.micro_batches,
            "np_rng_state": self._dice.bit_generator.state,
        }

    def state_dict(self, micro_batches: int | None = None) -> dict[str, Any]:
        """Returns where the sampler stands, equal on all ranks: numbers, texts, lists and dicts of them.

        Args:
            micro_batches: Where it stood after so many of them, as those that read ahead need it; None: now.

        Raises:
            ValueError: The state after ``micro_batches`` is no longer remembered.
        """
        if micro_batches is None:
            return self._state()
        for state in reversed(self._states):
            if state["micro_batches"] == micro_batches:
                return state
        raise ValueError(
            f"DeepSpeedDataSampler: expected one of the last {_REMEMBERED} states up to micro-batch "
            f"{self.micro_batches}, found micro-batch {micro_batches}; older states are not kept"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to where :meth:`state_dict` was, also with other numbers of ranks or samples per batch.

        A state of the published package has no generator that could go on; then the curriculum goes on at its step
        with new draws, and a line says so.
        """
        self._forget_clusters()
        self.consumed_samples = int(state_dict["consumed_samples"])
        self.curriculum_step = int(state_dict["curriculum_step"])
        self._waiting = []
        self.micro_batches = int(state_dict.get("micro_batches", 0))
        self.current_difficulties = {}
        if "data_cluster_bounds" in state_dict:
            for bounds in state_dict["data_cluster_bounds"]:
                self._clusters.grow(bounds)
            self._positions = list(state_dict["data_cluster_current_position"])
            self._passes = list(state_dict["data_cluster_passes"])
            self._orders = [self._shuffled(cluster) for cluster in range(len(self._positions))]
            self._dice.bit_generator.state = state_dict["np_rng_state"]
            self._waiting = list(state_dict["batch"])
            self.current_difficulties = dict(state_dict["current_difficulties"])
        else:
            log_dist(
                f"data sampler: the saved state was written by the published package; the curriculum continues at step "
                f"{self.curriculum_step}, with other random draws"
            )
        self._states.clear()
        self._states.append(self._state())


def _read(config: Mapping[str, Any] | DataEfficiency) -> DataEfficiency:
    if isinstance(config, DataEfficiency):  # of a configuration, which was checked
        return config
    section = parse_section({"data_efficiency": dict(config)}, "data_efficiency")
    assert isinstance(section, DataEfficiency)
    findings = ConfigMessages({}, {}, None)
    check_data_efficiency(section, findings)
    findings.raise_if_any()
    return section
