"""Upstream's import path of the modules below it."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.fp16 import fused_optimizer as fused_optimizer
    from deepspeed.runtime.fp16 import loss_scaler as loss_scaler
    from deepspeed.runtime.fp16 import onebit as onebit
    from deepspeed.runtime.fp16 import unfused_optimizer as unfused_optimizer

lazy_names(__name__)
