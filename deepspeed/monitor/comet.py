"""``comet``: an experiment of Comet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.monitor.by_step import by_step
from deepspeed.monitor.sink import Event, Monitor, require_package


class CometMonitor(Monitor):
    """Logs to an experiment that ``comet_ml.start`` opens or continues.

    The engine's events are reported once ``samples_log_interval`` samples have passed since those reported last;
    values in between are left out.

    Args:
        comet_config: The section.
    """

    section = "comet"

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config.enabled)
        if self.enabled:
            require_package("comet_ml", self.section)
        self.samples_log_interval = comet_config.samples_log_interval
        self._settings = {
            name: value
            for name in ("api_key", "workspace", "project", "experiment_key", "mode", "online")
            if (value := getattr(comet_config, name)) is not None
        }
        self._name = comet_config.experiment_name
        self._experiment: Any = None
        self._reported: int | None = None

    @property
    def experiment(self) -> Any:
        """Comet's experiment object; None before the first event and on other ranks."""
        return self._experiment

    def _open(self) -> None:
        import comet_ml

        if self._experiment is not None:  # it was closed; go on with it
            self._settings["experiment_key"] = self._experiment.get_key()
        self._experiment = comet_ml.start(**self._settings)
        if self._name is not None:
            self._experiment.set_name(self._name)

    def _write(self, events: Sequence[Event]) -> None:
        for step, values in by_step(events):
            if self._reported is not None and self._reported < step < self._reported + self.samples_log_interval:
                continue
            self._reported = step
            self._experiment.log_metrics(values, step=step)

    def _flush(self) -> None:
        self._experiment.flush()

    def _close(self) -> None:
        self._experiment.end()
