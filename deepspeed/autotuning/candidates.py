"""Candidate configurations: all values for the keys that the configuration leaves open, with one global batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from deepspeed.autotuning.experiment import ACCUMULATION, MICRO, STAGE, TOTAL, Changes, get
from deepspeed.errors import DeepSpeedConfigError

OFFLOAD_OPTIMIZER, OFFLOAD_PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
BLOCKS = "activation_checkpointing.blocks"
_DEGREES = {"tensor_parallel.autotp_size": "tp", "sequence_parallel_size": "sp", "expert_parallel.autoep_size": "ep"}
_BUCKETS: dict[str, tuple[Any, ...]] = {
    "zero_optimization.reduce_bucket_size": (50_000_000, 200_000_000, 500_000_000),
    "zero_optimization.overlap_comm": (True, False),
}
"""Values that are also tried for the best candidates if ``autotuning.fast`` is false."""


@dataclass(frozen=True)
class CandidateGroup:
    """A candidate without its micro-batch."""

    stage: int  # the ZeRO stage
    changes: Changes = field(default_factory=dict)  # differences from the user's configuration, without batch sizes
    words: tuple[str, ...] = ()  # parts of its name besides stage and batch sizes

    def plus(self, word: str, changes: Changes) -> CandidateGroup:
        """Returns the group with further changes; ``word`` stands for them in its name."""
        return replace(self, changes={**self.changes, **changes}, words=(*self.words, word))


@dataclass(frozen=True)
class BatchLimits:
    """The global batch of all candidates and the limits of a micro-batch, in samples."""

    total: int  # samples of an update, over all ranks
    least: int = 1  # smallest micro-batch
    most: int = 1024  # largest micro-batch


@dataclass(frozen=True)
class CandidateSpace:
    """The candidates of one configuration."""

    config: Mapping[str, Any]
    choices: Mapping[str, Sequence[Any]]  # candidates by path; an empty list leaves a key open
    limits: BatchLimits
    ranks: int
    allowed: Sequence[int] | None  # micro-batch sizes; None: all that divide the batch
    # whether the device has memory of its own, so that offloading to the host saves some
    offloads: bool

    def _is_open(self, path: str) -> bool:
        return path in self.choices or get(self.config, path) is None

    def settings(self) -> list[CandidateGroup]:
        """Returns the groups that are planned first."""
        listed = [path for path, values in self.choices.items() if values and path not in (MICRO, TOTAL, STAGE)]
        found = []
        for stage in self._stages():
            for values in product(*(self.choices[path] for path in listed)):
                changes = dict(zip(listed, values, strict=True))
                words = [f"{_DEGREES.get(path, path.rpartition('.')[2])}{value}" for path, value in changes.items()]
                found.append(CandidateGroup(stage, {STAGE: stage, **changes}, tuple(words)))
        return found

    def _stages(self) -> list[int]:
        listed = self.choices.get(STAGE)
        if listed:
            return [int(stage) for stage in listed]
        given = get(self.config, STAGE)
        return [0, 1, 2, 3] if listed is not None or given is None else [int(given)]

    def relieved(self, setting: CandidateGroup) -> list[CandidateGroup]:
        """Returns groups that need less memory than ``setting``, to try if its largest micro-batch does not fit."""
        found = []
        if self._is_open(BLOCKS):
            found.append(setting.plus("recompute", {BLOCKS: True}))
        if self.offloads and setting.stage > 0 and self._is_open(OFFLOAD_OPTIMIZER):
            changes: Changes = {OFFLOAD_OPTIMIZER: {"device": "cpu"}}
            if setting.stage == 3 and self._is_open(OFFLOAD_PARAM):
                changes[OFFLOAD_PARAM] = {"device": "cpu"}
            found += [other.plus("offload", changes) for other in (setting, *found)]
        return found

    def refined(self, setting: CandidateGroup) -> list[CandidateGroup]:
        """Returns variants of ``setting`` in which one key of :data:`_BUCKETS` differs."""
        return [
            setting.plus(f"{path.rpartition('.')[2]}{value}", {path: value})
            for path, values in _BUCKETS.items()
            if self._is_open(path) and path not in setting.changes
            for value in values
        ]

    def micro_batches(self, setting: CandidateGroup) -> list[int]:
        """Returns the micro-batch sizes of a group, largest first; DeepSpeedConfigError where there are none."""
        own = self._samples_of_rank(setting)
        allowed = self.allowed or self.choices.get(MICRO) or range(1, own + 1)
        sizes = range(self.limits.least, self.limits.most + 1)
        found = [micro for micro in sorted(set(allowed), reverse=True) if own % micro == 0 and micro in sizes]
        if not found:
            raise DeepSpeedConfigError(
                f"{MICRO}: none of the micro-batch sizes to try divides the {own} samples of a rank's update; "
                f"change {TOTAL}, the list of sizes, or autotuning.min_/max_train_micro_batch_size_per_gpu"
            )
        return found

    def changes(self, setting: CandidateGroup, micro: int) -> Changes:
        """Returns a candidate as its differences from the user's configuration."""
        accumulation = self.accumulation(setting, micro)
        return {**setting.changes, TOTAL: self.limits.total, MICRO: micro, ACCUMULATION: accumulation}

    def accumulation(self, setting: CandidateGroup, micro: int) -> int:
        """Returns the number of micro-batches per update and rank."""
        return self._samples_of_rank(setting) // micro

    def name(self, setting: CandidateGroup, micro: int) -> str:
        """Returns the name of a candidate; its folder has the same name."""
        words = "".join(f"_{word}" for word in setting.words)
        return f"z{setting.stage}_gas{self.accumulation(setting, micro)}_tmbspg{micro}{words}"

    def _samples_of_rank(self, setting: CandidateGroup) -> int:
        shared = [
            max(int(setting.changes.get(path, get(self.config, path)) or 1), 1)
            for path in ("tensor_parallel.autotp_size", "sequence_parallel_size")
        ]
        ranks = max(self.ranks // (shared[0] * shared[1]), 1)
        own, rest = divmod(self.limits.total, ranks)
        if rest or not own:
            raise DeepSpeedConfigError(
                f"{TOTAL}={self.limits.total}: expected a multiple of the {ranks} data-parallel ranks; change "
                "the batch or the number of ranks"
            )
        return own
