"""Pipeline modules (:mod:`deepspeed.parallel.pipe.module`)."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "DualPipeVModule": "deepspeed.pipe",
        "LayerSpec": "deepspeed.pipe",
        "PipelineError": "deepspeed.errors",
        "PipelineModule": "deepspeed.pipe",
        "TiedLayerSpec": "deepspeed.pipe",
    },
)
