"""The known path of cut layers; they live in :mod:`deepspeed.parallel.tensor`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "LinearAllreduce": "deepspeed.parallel.tensor.linear:RowLinear",
        "LinearLayer": "deepspeed.parallel.tensor.linear:ColumnLinear",
        "VocabParallelEmbedding": "deepspeed.parallel.tensor.vocabulary:VocabularyEmbedding",
        "HiddenParallelEmbedding": "deepspeed.parallel.tensor.vocabulary:WidthEmbedding",
        "set_autotp_mode": "deepspeed.parallel.tensor.request",
    },
)
