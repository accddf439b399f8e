"""Sampling by difficulty; re-exports; the code is in :mod:`deepspeed.data`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__, submodules=["data_analyzer", "data_sampler", "indexed_dataset", "variable_batch_size_and_lr"]
)
