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
from deepspeed.zero.update.optimizer import DeepSpeedZeroOptimizer

if TYPE_CHECKING:
    from deepspeed.parallel.pipe.interpreter import Interpreter


@dataclass(frozen=True)
class EngineInspection:
    """The parts of an engine whose memory and traffic can be counted.

    Attributes:
        root: The configuration.
        precision: Dtypes.
        groups: The ranks that share parameters, gradients and decisions.
        buckets: The buckets of parameters.
        memory_tracker: Bytes that are held, by kind and tier.
        updater: The ZeRO optimizer, or None.
        driver: The update driver: what updates exchange.
        reducer: The buckets of gradients, and how they are reduced; None where nothing is trained.
        interpreter: The interpreter of a pipeline stage, or None.
    """

    root: Root
    precision: PrecisionPolicy
    groups: Groups
    buckets: Sequence[Bucket]
    memory_tracker: MemoryTracker
    updater: DeepSpeedZeroOptimizer | None
    driver: UpdateDriver
    reducer: GradientReducer | None
    interpreter: Interpreter | None = None
