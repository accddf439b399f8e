"""Makes batches of about equal numbers of tokens, and scales learning rates to their sizes."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.data.batching.loading": (
            "VariableBatchSizeLR get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed"
        ),
        "deepspeed.data.batching.packing": "batch_by_seqlens scale_lr",
    },
)
