"""Where programs import the engine that trains and generates from."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, {"DeepSpeedHybridEngine": "deepspeed.engine.hybrid"})
