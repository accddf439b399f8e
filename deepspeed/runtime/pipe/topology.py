"""Pipeline topologies (:mod:`deepspeed.parallel.pipe.topology`)."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "PipeDataParallelTopology": "deepspeed.parallel.pipe.topology",
        "PipeModelDataParallelTopology": "deepspeed.parallel.pipe.topology",
        "PipelineParallelGrid": "deepspeed.parallel.pipe.grid",
        "ProcessTopology": "deepspeed.parallel.pipe.topology",
    },
)
