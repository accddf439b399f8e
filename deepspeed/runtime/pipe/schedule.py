"""Pipeline schedules (:mod:`deepspeed.parallel.pipe.schedule`)."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "BackwardPass": "deepspeed.parallel.pipe.schedule.instructions",
        "BufferOpInstruction": "deepspeed.parallel.pipe.schedule.instructions",
        "DataParallelSchedule": "deepspeed.parallel.pipe.schedule.published",
        "ForwardPass": "deepspeed.parallel.pipe.schedule.instructions",
        "InferenceSchedule": "deepspeed.parallel.pipe.schedule.published",
        "LoadMicroBatch": "deepspeed.parallel.pipe.schedule.instructions",
        "OptimizerStep": "deepspeed.parallel.pipe.schedule.instructions",
        "PipeInstruction": "deepspeed.parallel.pipe.schedule.instructions",
        "PipeSchedule": "deepspeed.parallel.pipe.schedule.published",
        "RecvActivation": "deepspeed.parallel.pipe.schedule.instructions",
        "RecvGrad": "deepspeed.parallel.pipe.schedule.instructions",
        "ReduceGrads": "deepspeed.parallel.pipe.schedule.instructions",
        "ReduceTiedGrads": "deepspeed.parallel.pipe.schedule.instructions",
        "SendActivation": "deepspeed.parallel.pipe.schedule.instructions",
        "SendGrad": "deepspeed.parallel.pipe.schedule.instructions",
        "TrainSchedule": "deepspeed.parallel.pipe.schedule.published",
    },
)
