"""Counts the operations, parameters and time of a forward pass, module by module.

``counting`` computes what operations cost, ``profile`` collects it by module, ``report`` writes it down, ``profiler``
is the public class.
"""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "FlopsProfiler": "deepspeed.profiling.flops_profiler.profiler",
        "get_model_profile": "deepspeed.profiling.flops_profiler.profiler",
    },
    submodules=["profile", "profiler"],
)
