"""Upstream's import path for names of ``data.batching.loading`` and ``data.batching.packing``."""

from deepspeed.data.batching.loading import (
    VariableBatchSizeLR,
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
)
from deepspeed.data.batching.packing import batch_by_seqlens, scale_lr

__all__ = [
    "VariableBatchSizeLR",
    "batch_by_seqlens",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
    "scale_lr",
]
