"""The view of an engine that the planner reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepspeed.config.sections.root import Root
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.group import Groups
from deepspeed.zero.storage import MemoryTracker
from deepspeed.zero.update.driver import UpdateDriver
from deepspeed.zero.update.updater import Updater

if TYPE_CHECKING:
    from deepspeed.parallel.pipe.interpreter import Interpreter


@dataclass(frozen=True)
class EngineInspection:
    """The parts of an engine whose memory and traffic can be counted."""

    root: Root  # the configuration
    precision: PrecisionPolicy  # dtypes
    groups: Groups  # the ranks that share parameters, gradients and decisions
    buckets: Sequence[Bucket]  # the buckets of parameters
    memory_tracker: MemoryTracker  # bytes that are held, by kind and tier
    updater: Updater | None  # updates the masters; None where nothing is trained
    driver: UpdateDriver  # the update driver: what updates exchange
    reducer: GradientReducer | None  # the buckets of gradients, and how they are reduced; None where nothing is trained
    interpreter: Interpreter | None = None  # the interpreter of a pipeline stage, or None
