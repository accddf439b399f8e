"""Upstream's import path for names of ``monitor.monitor``."""

from deepspeed.monitor.monitor import TensorBoardMonitor as TensorBoardMonitor
