"""The engine feature of ``curriculum_learning``: a difficulty per step, which forwards may get as a length."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from typing_extensions import override

from deepspeed.config.sections.root import Root
from deepspeed.data.curriculum.scheduler import CurriculumScheduler, settings_of
from deepspeed.engine_feature import SEQUENCE_RANKS, Conflict, EngineFeature, EngineHooks, EngineSetup, takes_keyword
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist

SEQUENCE_LENGTH = "curriculum_seqlen"
"""The keyword of the length to which a forward must cut its inputs."""


def _passes_lengths(root: Root) -> bool:
    """Returns whether training forwards get the length to which they must cut their inputs."""
    section = root.curriculum_learning
    return section is not None and section.enabled and section.curriculum_type == "seqlen"


class CurriculumHooks(EngineHooks):
    """Updates the difficulty at each step of one engine, and passes it to training forwards as length if requested."""

    def __init__(self, curriculum: CurriculumScheduler, *, passes_length: bool) -> None:
        self.curriculum = curriculum
        self.exposed = {"curriculum_scheduler_legacy": curriculum}
        self._passes_length = passes_length
        self.resume(0, 0)

    @override
    def resume(self, global_steps: int, skipped_steps: int) -> None:
        # A custom schedule may get its function after initialize; the first forward needs it.
        is_custom = self.curriculum.get_state()["schedule_type"] == "custom"
        if not is_custom or self.curriculum.custom_get_difficulty is not None:
            self.curriculum.update_difficulty(global_steps + 1)

    @override
    def after_update(self, global_steps: int, *, was_skipped: bool) -> None:
        self.resume(global_steps, 0)

    @override
    def before_forward(self, *, is_training: bool, global_steps: int, micro_steps: int) -> dict[str, Any]:
        if not is_training:
            return {}
        self.curriculum.update_difficulty(global_steps + 1)
        return {SEQUENCE_LENGTH: self.curriculum.get_current_difficulty()} if self._passes_length else {}


class LengthCurriculum(EngineFeature):
    """The curriculum of the older section ``curriculum_learning``."""

    title = "curriculum by length"
    setting = 'curriculum_learning.curriculum_type "seqlen"'
    conflicts = (
        Conflict(
            setting,
            lambda setup: _passes_lengths(setup.root),
            SEQUENCE_RANKS,
            "the forward would cut its part of the sequence to the length of the whole sequence",
            "leave the key out and cut whole sequences before they are divided, to "
            "engine.curriculum_scheduler_legacy.get_current_difficulty() tokens",
        ),
    )

    @override
    def refuse(self, setup: EngineSetup) -> None:
        if _passes_lengths(setup.root) and not setup.has_stages:
            _check_forward(setup.model)

    @override
    def hooks(self, setup: EngineSetup, runtime: Any, groups: Any, batch_size: int) -> EngineHooks | None:
        section = setup.root.curriculum_learning
        if section is None or not section.enabled:
            return None
        # A pipeline's function for batches (set_batch_fn) cuts them instead.
        passes_length = _passes_lengths(setup.root) and not setup.has_stages
        return CurriculumHooks(CurriculumScheduler(settings_of(section)), passes_length=passes_length)


def _check_forward(model: nn.Module) -> None:
    if not takes_keyword(model, SEQUENCE_LENGTH):
        raise DeepSpeedConfigError(
            f'curriculum_learning.curriculum_type "seqlen": expected {type(model).__name__}.forward to take the '
            f"keyword {SEQUENCE_LENGTH}, which it does not; add it, and let the forward cut its "
            f"inputs to [:, :{SEQUENCE_LENGTH}]; or leave curriculum_type out and cut the batch before the "
            "forward (deepspeed.data.curriculum.shortened) to "
            "engine.curriculum_scheduler_legacy.get_current_difficulty()"
        )
    if not takes_keyword(model, SEQUENCE_LENGTH, by_name=True):
        log_dist(
            f"curriculum_learning: {type(model).__name__}.forward takes {SEQUENCE_LENGTH} by **kwargs only. "
            f"Make sure that it cuts its inputs to {SEQUENCE_LENGTH} tokens; otherwise all training is at full length",
            level=logging.WARNING,
        )


FEATURE = LengthCurriculum()
