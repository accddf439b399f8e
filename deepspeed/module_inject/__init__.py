"""The known path of layers that take the place of others; fused ones are missing (:mod:`deepspeed.features`)."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, submodules=["layers"])
