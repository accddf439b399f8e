"""Upstream's import path for names of ``monitor.monitor``."""

from deepspeed.monitor.monitor import WandbMonitor as WandbMonitor
