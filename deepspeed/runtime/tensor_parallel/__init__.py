"""The known path of the configuration of tensor parallelism; it lives in :mod:`deepspeed.config`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "TPConfig": "deepspeed.config.sections.tensor_parallel:TpGroup",
        "TPTrainingConfig": "deepspeed.config.sections.tensor_parallel:TensorParallel",
    },
)
