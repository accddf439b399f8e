"""Sequence parallelism, at the path that programs import; it lives in :mod:`deepspeed.parallel.sequence`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "exchange": "deepspeed.parallel.sequence.exchange",
        "chunked_attention": "deepspeed.parallel.sequence.chunked",
        "chunked_cross_entropy": "deepspeed.parallel.sequence.vocabulary",
        "mean_loss": "deepspeed.parallel.sequence.loss",
        "ring_attention": "deepspeed.parallel.sequence.ring",
        "sum_over_ranks": "deepspeed.parallel.sequence.loss",
    },
    submodules=["cross_entropy", "fpdt_layer", "layer"],
)
