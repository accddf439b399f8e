"""Compresses models while they train: quantized weights and activations, pruning, fewer layers."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.compression.feature": "compression_scheduler",
        "deepspeed.compression.report": "compression_state",
        "deepspeed.compression.installing": "init_compression student_initialization",
        "deepspeed.compression.cleaning": "redundancy_clean",
    },
    submodules="basic_layer compress helper",
)
