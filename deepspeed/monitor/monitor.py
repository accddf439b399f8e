"""All monitors behind one call: ``MonitorMaster(config).write_events([(name, value, step), ...])``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from deepspeed import comm
from deepspeed.config.single import parse_section
from deepspeed.monitor.comet import CometMonitor
from deepspeed.monitor.csv_monitor import csvMonitor
from deepspeed.monitor.sink import Event, Monitor
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.monitor.wandb import WandbMonitor

_KINDS: dict[str, type[Any]] = {
    "tensorboard": TensorBoardMonitor,
    "csv_monitor": csvMonitor,
    "wandb": WandbMonitor,
    "comet": CometMonitor,
}


def _section(config: Any, name: str) -> Any:
    """A monitor's section of a dict, a path, a parsed configuration or an object with attributes of that name."""
    return getattr(config, name) if hasattr(config, name) else parse_section(config, name)


def _close_all(monitors: Sequence[Monitor]) -> None:
    for monitor in monitors:
        monitor.close()


class MonitorMaster:
    """Writes events to every monitor that the configuration switches on, from rank 0.

    Args:
        monitor_config: A ``ds_config`` (dict, path, base64 or parsed), or any object with the attributes
            ``tensorboard``, ``csv_monitor``, ``wandb`` and ``comet``.

    Attributes:
        enabled: Whether any monitor is switched on; the same on every rank.
        tb_monitor: The TensorBoard monitor, or None; so are ``csv_monitor``, ``wandb_monitor`` and ``comet_monitor``.

    Raises:
        DeepSpeedConfigError: On every rank, if the package of a monitor is not installed.
    """

    def __init__(self, monitor_config: Any) -> None:
        sections = {name: _section(monitor_config, name) for name in _KINDS}
        wanted = {name: section for name, section in sections.items() if section is not None and section.enabled}
        self.enabled = bool(wanted)
        # Built on every rank, for the check of their packages; written to on rank 0 only.
        built: dict[str, Monitor] = {name: _KINDS[name](section) for name, section in wanted.items()}
        self.tb_monitor = built.get("tensorboard")
        self.csv_monitor = built.get("csv_monitor")
        self.wandb_monitor = built.get("wandb")
        self.comet_monitor = built.get("comet")
        self._writes = not comm.is_initialized() or comm.get_rank() == 0
        for monitor in built.values():
            monitor.enabled = self._writes
        self._monitors = tuple(built.values()) if self._writes else ()
        # Also runs when the interpreter exits: TensorBoard's thread would take its last events with it.
        weakref.finalize(self, _close_all, self._monitors)

    @property
    def writes(self) -> bool:
        """Whether this rank writes anything."""
        return bool(self._monitors)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes ``(name, value, step)`` events on rank 0; other ranks may call it too and do nothing."""
        for monitor in self._monitors:
            monitor.write_events(event_list)

    def flush(self) -> None:
        """Brings everything written so far to where a reader sees it."""
        for monitor in self._monitors:
            monitor.flush()

    def close(self) -> None:
        """Flushes and lets go of files and connections; the next event opens them again."""
        _close_all(self._monitors)


__all__ = ["CometMonitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]
