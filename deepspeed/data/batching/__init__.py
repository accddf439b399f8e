"""Makes batches of about equal numbers of tokens, and scales learning rates to their sizes."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "VariableBatchSizeLR": "deepspeed.data.batching.loading",
        "batch_by_seqlens": "deepspeed.data.batching.packing",
        "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed": "deepspeed.data.batching.loading",
        "scale_lr": "deepspeed.data.batching.packing",
    },
)
