"""Upstream's import path for names of ``ops.lion.fused_lion``."""

from deepspeed.ops.lion.fused_lion import DeepSpeedCPULion as DeepSpeedCPULion
