"""Sequence parallelism, at the path that programs import; it lives in :mod:`deepspeed.parallel.sequence`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, submodules=["parallel_state_sp", "ulysses_sp"])
