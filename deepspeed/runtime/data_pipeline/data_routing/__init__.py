"""Token dropping; re-exports; the code is in :mod:`deepspeed.dropping`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, submodules=["basic_layer", "helper", "scheduler"])
