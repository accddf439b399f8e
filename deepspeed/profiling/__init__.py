"""Measures time, memory and operations; names ranges for profilers."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, submodules="flops_profiler ranges timer")
