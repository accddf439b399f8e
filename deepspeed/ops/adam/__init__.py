"""The optimizers Adam and AdamW: for the device, and with fp32 states for offload."""

from deepspeed.lazy import lazy_names
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam
from deepspeed.ops.adam.fused_adam import FusedAdam as FusedAdam

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.ops.adam.cpu_adam": "DeepSpeedCPUAdam",
        "deepspeed.ops.adam.fused_adam": "FusedAdam",
    },
    submodules="cpu_adam fused_adam zenflow_cpu_adam zenflow_torch_adam",
)
