"""Compresses models while they train: quantized weights and activations, pruning, fewer layers."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.compression import basic_layer as basic_layer
    from deepspeed.compression import compress as compress
    from deepspeed.compression import helper as helper
    from deepspeed.compression import scheduler as scheduler
    from deepspeed.compression.cleaning import redundancy_clean as redundancy_clean
    from deepspeed.compression.feature import compression_scheduler as compression_scheduler
    from deepspeed.compression.installing import init_compression as init_compression
    from deepspeed.compression.installing import student_initialization as student_initialization
    from deepspeed.compression.report import compression_state as compression_state

lazy_names(__name__)
