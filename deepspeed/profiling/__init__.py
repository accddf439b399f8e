"""Measures time, memory and operations; names ranges for profilers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.profiling import flops_profiler as flops_profiler
    from deepspeed.profiling import ranges as ranges
    from deepspeed.profiling import timer as timer
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
