"""Batches by tokens; re-exports; the code is in :mod:`deepspeed.data.batching`."""

from __future__ import annotations

from deepspeed.data.batching.loading import get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed
from deepspeed.data.batching.packing import batch_by_seqlens, scale_lr
from deepspeed.data.batching.rates import VariableBatchSizeLR

__all__ = [
    "VariableBatchSizeLR",
    "batch_by_seqlens",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
    "scale_lr",
]
