"""Measures time, memory and operations; names ranges for profilers."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.profiling import flops_profiler as flops_profiler
    from deepspeed.profiling import ranges as ranges
    from deepspeed.profiling import timer as timer

lazy_names(__name__)
