"""The sections of the monitors, by upstream's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.config.sections.monitor import Comet as CometConfig
from deepspeed.config.sections.monitor import CsvMonitor as CSVConfig
from deepspeed.config.sections.monitor import TensorBoard as TensorBoardConfig
from deepspeed.config.sections.monitor import Wandb as WandbConfig
from deepspeed.config.single import parse_section


@dataclass(frozen=True)
class DeepSpeedMonitorConfig:
    """The four sections; what :class:`~deepspeed.monitor.monitor.MonitorMaster` reads."""

    tensorboard: TensorBoardConfig
    csv_monitor: CSVConfig
    wandb: WandbConfig
    comet: CometConfig

    @property
    def enabled(self) -> bool:
        """Whether any of them is switched on."""
        return any(each.enabled for each in (self.tensorboard, self.csv_monitor, self.wandb, self.comet))


def get_monitor_config(param_dict: Any) -> DeepSpeedMonitorConfig:
    """The sections of a configuration (dict, path, base64 or parsed); absent ones are switched off."""

    def read(name: str, section: type[Any]) -> Any:
        return parse_section(param_dict, name) or section()

    return DeepSpeedMonitorConfig(
        tensorboard=read("tensorboard", TensorBoardConfig),
        csv_monitor=read("csv_monitor", CSVConfig),
        wandb=read("wandb", WandbConfig),
        comet=read("comet", CometConfig),
    )


__all__ = [
    "CSVConfig",
    "CometConfig",
    "DeepSpeedMonitorConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "get_monitor_config",
]
