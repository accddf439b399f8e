"""Compresses models while they train: quantized weights and activations, pruning, fewer layers."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "compression_scheduler": "deepspeed.compression.feature",
        "compression_state": "deepspeed.compression.report",
        "init_compression": "deepspeed.compression.installing",
        "redundancy_clean": "deepspeed.compression.cleaning",
        "student_initialization": "deepspeed.compression.installing",
    },
    submodules=["basic_layer", "compress", "helper"],
)
