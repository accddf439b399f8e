"""The optimizer Adagrad (Duchi and others, 2011), with fp32 states for offload."""

from deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
