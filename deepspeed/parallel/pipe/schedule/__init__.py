"""Lists what each pipeline stage does in a step, in order, and computes what a schedule costs.

``lists`` makes the computations of all stages and derives one stage's instructions from them. ``chunks`` says which
stage has which layers, ``published`` has the schedules in the form that other programs use.
"""

from __future__ import annotations

from deepspeed.parallel.pipe.schedule.chunks import TRAIN_SCHEDULES, place_chunks
from deepspeed.parallel.pipe.schedule.lists import (
    Action,
    Kind,
    Schedule,
    StageSchedule,
    inference_steps,
    make_inference,
    make_schedule,
    training_steps,
)

__all__ = [
    "TRAIN_SCHEDULES",
    "Action",
    "Kind",
    "Schedule",
    "StageSchedule",
    "inference_steps",
    "make_inference",
    "make_schedule",
    "place_chunks",
    "training_steps",
]
