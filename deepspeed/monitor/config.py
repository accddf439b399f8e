"""Upstream's import path for names of ``config.sections.monitor`` and ``monitor.monitor``."""

from deepspeed.config.sections.monitor import Comet as CometConfig
from deepspeed.config.sections.monitor import CsvMonitor as CSVConfig
from deepspeed.config.sections.monitor import TensorBoard as TensorBoardConfig
from deepspeed.config.sections.monitor import Wandb as WandbConfig
from deepspeed.monitor.monitor import DeepSpeedMonitorConfig, get_monitor_config

__all__ = [
    "CSVConfig",
    "CometConfig",
    "DeepSpeedMonitorConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "get_monitor_config",
]
