"""Counts the operations, parameters and time of a forward pass, module by module.

:mod:`.profile` counts operations and collects them by module; :mod:`.profiler` has the public functions and the report.
"""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.profiling.flops_profiler import profile as profile
    from deepspeed.profiling.flops_profiler import profiler as profiler
    from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler as FlopsProfiler
    from deepspeed.profiling.flops_profiler.profiler import duration_to_string as duration_to_string
    from deepspeed.profiling.flops_profiler.profiler import flops_to_string as flops_to_string
    from deepspeed.profiling.flops_profiler.profiler import get_model_profile as get_model_profile
    from deepspeed.profiling.flops_profiler.profiler import macs_to_string as macs_to_string
    from deepspeed.profiling.flops_profiler.profiler import number_to_string as number_to_string
    from deepspeed.profiling.flops_profiler.profiler import params_to_string as params_to_string

lazy_names(__name__)
