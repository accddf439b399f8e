"""Curriculum schedules; re-exports; the code is in :mod:`deepspeed.data.curriculum`."""

from __future__ import annotations

from deepspeed.data.curriculum.scheduler import CurriculumScheduler

__all__ = ["CurriculumScheduler"]
