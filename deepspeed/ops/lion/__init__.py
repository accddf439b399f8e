"""The optimizer Lion (Chen and others, 2023): for the device, and with fp32 states for offload."""

from deepspeed.ops.lion.fused_lion import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
