"""Computes the difficulty of the training data as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.config.data_rules import problems_of
from deepspeed.config.sections.data_efficiency import CurriculumLearning, CurriculumMetric
from deepspeed.nested import map_tensors


def settings_of(section: CurriculumLearning | CurriculumMetric) -> dict[str, Any]:
    """Returns a section of the configuration as the dict that :class:`CurriculumScheduler` takes."""
    return section.model_dump(exclude_none=True)


class CurriculumScheduler:
    """Computes the difficulty at each step by one of four types of schedule.

    ``fixed_linear`` and ``fixed_root`` grow by :func:`~deepspeed.data.curriculum.scheduler.grown`; ``fixed_discrete``
    is a list of difficulties, each but the last one with its last step; ``custom`` is a function.

    Args:
        config: ``min_difficulty``, ``max_difficulty``, ``schedule_type`` (one of the four) and ``schedule_config``:
            ``total_curriculum_step``, ``difficulty_step`` and for ``fixed_root`` ``root_degree``; or ``difficulty`` and
            ``max_step`` for ``fixed_discrete``.

    Raises:
        ValueError: The settings are incomplete or contradictory. The message lists every problem.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        found = problems_of(config)
        if found:
            lines = "; ".join(f"{'.'.join(path)} {text}" for path, text in found)
            raise ValueError(f"CurriculumScheduler: {lines}")
        self._min: int = config["min_difficulty"]
        self._max: int = config["max_difficulty"]
        self._kind: str = config["schedule_type"]
        self._settings: dict[str, Any] = dict(config.get("schedule_config") or {})
        self._current = self._min
        self.custom_get_difficulty: Callable[[int], int] | None = None  # the function of a ``custom`` schedule, or None

    def get_current_difficulty(self) -> int:
        """Returns the difficulty of the latest update."""
        return self._current

    def set_current_difficulty(self, difficulty: int) -> None:
        """Sets the difficulty until the next update."""
        self._current = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Sets the function of a ``custom`` schedule."""
        self.custom_get_difficulty = schedule_function

    def get_state(self) -> dict[str, Any]:
        """Returns the bounds, the schedule and the current difficulty, without a custom function."""
        return {
            "min_difficulty": self._min,
            "max_difficulty": self._max,
            "current_difficulty": self._current,
            "schedule_type": self._kind,
            "schedule_config": dict(self._settings),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state of :meth:`get_state`."""
        self._min, self._max = state["min_difficulty"], state["max_difficulty"]
        self._kind, self._settings = state["schedule_type"], dict(state["schedule_config"])
        self._current = state["current_difficulty"]

    def get_difficulty(self, global_steps: int) -> int:
        """Returns the difficulty at a step, without setting it.

        Raises:
            ValueError: A ``custom`` schedule has no function yet.
        """
        if self._kind == "custom":
            if self.custom_get_difficulty is None:
                raise ValueError(
                    "CurriculumScheduler: a custom schedule needs a function, found none; set one with "
                    "engine.set_custom_curriculum_learning_schedule({metric: function}) or, for the older section "
                    "curriculum_learning, engine.curriculum_scheduler_legacy.set_custom_get_difficulty(function)"
                )
            return self.custom_get_difficulty(global_steps)
        if self._kind == "fixed_discrete":
            for difficulty, last_step in zip(self._settings["difficulty"], self._settings["max_step"], strict=False):
                if global_steps <= last_step:
                    return difficulty
            return self._settings["difficulty"][-1]
        return grown(
            global_steps,
            low=self._min,
            high=self._max,
            steps=self._settings["total_curriculum_step"],
            granularity=self._settings["difficulty_step"],
            degree=self._settings["root_degree"] if self._kind == "fixed_root" else 1,
        )

    def update_difficulty(self, global_steps: int) -> int:
        """Sets the current difficulty to that of a step, and returns it; a ``custom`` schedule may lower it."""
        self._current = self.get_difficulty(global_steps)
        return self._current


def grown(step: int, *, low: int, high: int, steps: int, granularity: int, degree: float = 1) -> int:
    """Returns the value at ``step`` of a growth from ``low`` to ``high`` with the ``degree``-th root of the step.

    It is ``floor((step / steps) ** (1 / degree) * (high - low) + low)``, rounded down to a multiple of ``granularity``,
    but at least the first multiple that is not below ``low``, and at most ``high``.

    Args:
        granularity: All values but ``high`` are multiples of it.
        degree: 1 grows linearly, 2 as the square root.
    """
    value = math.floor((step / steps) ** (1 / degree) * (high - low) + low)
    value = max(value - value % granularity, math.ceil(low / granularity) * granularity)
    return min(value, high)


def shortened(batch: Any, length: int) -> Any:
    """Returns the first ``length`` positions of every tensor ``[samples, positions, ...]`` in a batch, contiguous.

    A batch is tuples, lists and mappings; other tensors and objects are not changed.
    """
    return map_tensors(batch, lambda tensor: tensor[:, :length].contiguous() if tensor.dim() >= 2 else tensor)
