"""Upstream's import path for names of ``parallel.pipe.schedule.lists`` and ``parallel.pipe.schedule.published``."""

from deepspeed.parallel.pipe.schedule.lists import BackwardPass as BackwardPass
from deepspeed.parallel.pipe.schedule.lists import BufferOpInstruction as BufferOpInstruction
from deepspeed.parallel.pipe.schedule.lists import ForwardPass as ForwardPass
from deepspeed.parallel.pipe.schedule.lists import LoadMicroBatch as LoadMicroBatch
from deepspeed.parallel.pipe.schedule.lists import OptimizerStep as OptimizerStep
from deepspeed.parallel.pipe.schedule.lists import PipeInstruction as PipeInstruction
from deepspeed.parallel.pipe.schedule.lists import PipeSchedule as PipeSchedule
from deepspeed.parallel.pipe.schedule.lists import RecvActivation as RecvActivation
from deepspeed.parallel.pipe.schedule.lists import RecvGrad as RecvGrad
from deepspeed.parallel.pipe.schedule.lists import ReduceGrads as ReduceGrads
from deepspeed.parallel.pipe.schedule.lists import ReduceTiedGrads as ReduceTiedGrads
from deepspeed.parallel.pipe.schedule.lists import SendActivation as SendActivation
from deepspeed.parallel.pipe.schedule.lists import SendGrad as SendGrad
from deepspeed.parallel.pipe.schedule.published import DataParallelSchedule as DataParallelSchedule
from deepspeed.parallel.pipe.schedule.published import InferenceSchedule as InferenceSchedule
from deepspeed.parallel.pipe.schedule.published import TrainSchedule as TrainSchedule
