"""Upstream's import path for names of ``engine``, ``engine.engine`` and ``engine.parts``."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
    from deepspeed.engine.engine import MEMORY_OPT_ALLREDUCE_SIZE as MEMORY_OPT_ALLREDUCE_SIZE
    from deepspeed.engine.engine import autocast_if_enabled as autocast_if_enabled
    from deepspeed.engine.parts import DeepSpeedOptimizerCallable as DeepSpeedOptimizerCallable
    from deepspeed.engine.parts import DeepSpeedSchedulerCallable as DeepSpeedSchedulerCallable

lazy_names(__name__)
