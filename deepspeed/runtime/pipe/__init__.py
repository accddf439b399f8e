"""Pipeline parallelism, at the path that programs know (:mod:`deepspeed.parallel.pipe`)."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "LayerSpec": "deepspeed.pipe",
        "PipelineModule": "deepspeed.pipe",
        "ProcessTopology": "deepspeed.parallel.pipe.topology",
        "TiedLayerSpec": "deepspeed.pipe",
    },
    submodules=["engine", "module", "schedule", "topology"],
)
