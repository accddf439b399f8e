"""The pipeline engine (:mod:`deepspeed.engine.pipeline`)."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "DualPipeVEngine": "deepspeed.engine.pipeline",
        "PipelineEngine": "deepspeed.engine.pipeline",
    },
)
