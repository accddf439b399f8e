"""Pipeline modules, at the path that programs know (:mod:`deepspeed.parallel.pipe`)."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "transformers_state_dict": "deepspeed.parallel.pipe.transformers_models",
        "DualPipeVModule": "deepspeed.parallel.pipe.dualpipev",
        "LayerSpec": "deepspeed.parallel.pipe.spec",
        "PipelineModule": "deepspeed.parallel.pipe.module",
        "TiedLayerSpec": "deepspeed.parallel.pipe.spec",
    },
)
