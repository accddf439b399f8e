"""The calls of model compression, where programs import them from."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "init_compression": "deepspeed.compression.installing",
        "redundancy_clean": "deepspeed.compression.cleaning",
        "student_initialization": "deepspeed.compression.students",
    },
)
