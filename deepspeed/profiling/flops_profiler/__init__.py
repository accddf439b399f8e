"""Counts the operations, parameters and time of a forward pass, module by module.

:mod:`.profile` counts operations and collects them by module; :mod:`.profiler` has the public functions and the report.
"""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.profiling.flops_profiler.profiler": (
            "FlopsProfiler duration_to_string flops_to_string get_model_profile macs_to_string number_to_string "
            "params_to_string"
        ),
    },
    submodules="profile profiler",
)
