"""``wandb``: a run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.monitor.by_step import by_step
from deepspeed.monitor.sink import Event, Monitor, require_package


class WandbMonitor(Monitor):
    """Logs to the run that is open, else opens one with ``wandb.init``.

    Args:
        wandb_config: The section: ``enabled``, ``group``, ``team``, ``project``.
    """

    section = "wandb"

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config.enabled)
        if self.enabled:
            require_package("wandb", self.section)
        self.group = wandb_config.group
        self.team = wandb_config.team
        self.project = wandb_config.project
        self._owns_run = False
        self._run: Any = None

    def _open(self) -> None:
        import wandb

        self._run = wandb.run
        self._owns_run = self._run is None
        if self._owns_run:
            self._run = wandb.init(project=self.project, group=self.group, entity=self.team)

    def log(self, data: dict[str, float], step: int | None = None, commit: bool | None = None) -> None:
        """``Run.log`` of the run, for a script's own values; does nothing on other ranks."""
        if self.enabled:
            self._ensure_open()
            self._run.log(data, step=step, commit=commit)

    def _write(self, events: Sequence[Event]) -> None:
        for step, values in by_step(events):
            self._run.log(values, step=step)

    def _close(self) -> None:
        if self._owns_run:
            self._run.finish()
