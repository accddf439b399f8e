"""The experts of one rank; re-exports; the code is in :mod:`deepspeed.parallel.expert.experts`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, {"Experts": "deepspeed.parallel.expert.experts"})
