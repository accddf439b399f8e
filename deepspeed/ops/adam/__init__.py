"""The optimizers Adam and AdamW: for the device, and with fp32 states for offload."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.ops.adam import cpu_adam as cpu_adam
    from deepspeed.ops.adam import fused_adam as fused_adam
    from deepspeed.ops.adam import zenflow_cpu_adam as zenflow_cpu_adam
    from deepspeed.ops.adam import zenflow_torch_adam as zenflow_torch_adam
    from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam
    from deepspeed.ops.adam.fused_adam import FusedAdam as FusedAdam

lazy_names(__name__)
