"""Sequence parallelism for Transformers models; see :mod:`deepspeed.parallel.sequence`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

_ROOM = "deepspeed.parallel.sequence"
__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {"UlyssesSPAttentionHF": f"{_ROOM}.ulysses", "UlyssesSPDataLoaderAdapter": f"{_ROOM}.loader"},
)
