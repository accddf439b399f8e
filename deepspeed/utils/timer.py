"""Upstream's import path for names of ``profiling.timer``."""

from deepspeed.profiling.timer import BACKWARD_GLOBAL_TIMER as BACKWARD_GLOBAL_TIMER
from deepspeed.profiling.timer import BACKWARD_INNER_GLOBAL_TIMER as BACKWARD_INNER_GLOBAL_TIMER
from deepspeed.profiling.timer import BACKWARD_INNER_MICRO_TIMER as BACKWARD_INNER_MICRO_TIMER
from deepspeed.profiling.timer import BACKWARD_MICRO_TIMER as BACKWARD_MICRO_TIMER
from deepspeed.profiling.timer import BACKWARD_REDUCE_GLOBAL_TIMER as BACKWARD_REDUCE_GLOBAL_TIMER
from deepspeed.profiling.timer import BACKWARD_REDUCE_MICRO_TIMER as BACKWARD_REDUCE_MICRO_TIMER
from deepspeed.profiling.timer import FORWARD_GLOBAL_TIMER as FORWARD_GLOBAL_TIMER
from deepspeed.profiling.timer import FORWARD_MICRO_TIMER as FORWARD_MICRO_TIMER
from deepspeed.profiling.timer import STEP_GLOBAL_TIMER as STEP_GLOBAL_TIMER
from deepspeed.profiling.timer import STEP_MICRO_TIMER as STEP_MICRO_TIMER
from deepspeed.profiling.timer import NoopTimer as NoopTimer
from deepspeed.profiling.timer import SynchronizedWallClockTimer as SynchronizedWallClockTimer
from deepspeed.profiling.timer import ThroughputTimer as ThroughputTimer
