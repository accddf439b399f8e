"""Makes batches of about equal numbers of tokens, and scales learning rates to their sizes."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
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

lazy_names(__name__)
