"""Sequence-parallel attention; see :mod:`deepspeed.parallel.sequence.attention`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

_HOME = "deepspeed.parallel.sequence.attention"
__getattr__, __dir__, __all__ = lazy_names(__name__, {"DistributedAttention": _HOME, "_SeqAllToAll": _HOME})
