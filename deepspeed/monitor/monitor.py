"""Writes events to all monitors: ``MonitorMaster(config).write_events([(name, value, step), ...])``."""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from deepspeed import comm
from deepspeed.config.parsing import parse_section
from deepspeed.config.sections.monitor import Comet as CometConfig
from deepspeed.config.sections.monitor import CsvMonitor as CSVConfig
from deepspeed.config.sections.monitor import TensorBoard as TensorBoardConfig
from deepspeed.config.sections.monitor import Wandb as WandbConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import logger

Event: TypeAlias = tuple[str, float, int]
"""``(name, value, step)``. The engine passes the number of samples so far, over all ranks, as step."""


class Monitor:
    """Writes events to one destination, on rank 0 only.

    The public methods decide whether anything is written, and handle failures. A subclass implements ``_open``,
    ``_write``, ``_flush`` and ``_close``. The first event opens the destination, so that an engine that never trains
    creates no files.

    Attributes:
        section: Name of the monitor's section of the configuration.
        enabled: Whether events are written; False after the first failure.
    """

    section = ""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._is_open = False

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes events, oldest first.

        A failure (a full disk, a service that cannot be reached) is logged and disables this monitor, so that the
        training continues.
        """
        if self.enabled and event_list:
            with self._giving_up_on_failure():
                self._ensure_open()
                self._write(event_list)

    def flush(self) -> None:
        """Makes all events written so far visible to readers."""
        if self.enabled and self._is_open:
            with self._giving_up_on_failure():
                self._flush()

    def close(self) -> None:
        """Flushes and closes files and connections; the next event opens them again."""
        if self.enabled and self._is_open:
            self._is_open = False
            with self._giving_up_on_failure():
                self._close()

    @contextmanager
    def _giving_up_on_failure(self) -> Iterator[None]:
        """Disables this monitor and logs a warning if anything inside the context fails."""
        try:
            yield
        except Exception as error:
            self.enabled = False
            logger.warning(
                f"{self.section}: writing failed with {type(error).__name__}: {error}. This monitor is disabled; "
                "training continues"
            )

    def _ensure_open(self) -> None:
        if not self._is_open:
            self._open()
            self._is_open = True

    def _open(self) -> None:
        """Opens files or connections."""

    def _write(self, events: Sequence[Event]) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        """Makes written events visible to readers."""

    def _close(self) -> None:
        """Closes files or connections."""


def log_folder(section: Any) -> Path:
    """Returns ``<output_path>/<job_name>`` of a section, absolute, as the program may change its working directory."""
    return (Path(section.output_path or ".") / section.job_name).absolute()


def require_package(package: str, section: str) -> None:
    """Checks that the package of a monitor is installed. Every rank calls it, so that all raise together.

    Raises:
        DeepSpeedConfigError: The package is not installed.
    """
    if package not in sys.modules and find_spec(package) is None:
        raise DeepSpeedConfigError(
            f"{section}.enabled: expected the package {package}, which is not installed; run `pip install {package}`, "
            f"or set {section}.enabled to false"
        )


def by_step(events: Sequence[Event]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields ``(step, {name: value})`` for each group of events with the same step."""
    current, values = None, {}
    for name, value, step in events:
        if current is not None and step != current:
            yield current, values
            values = {}
        current = step
        values[name] = value
    if current is not None:
        yield current, values


@dataclass(frozen=True)
class DeepSpeedMonitorConfig:
    """The sections that :class:`~deepspeed.monitor.monitor.MonitorMaster` reads."""

    tensorboard: TensorBoardConfig
    csv_monitor: CSVConfig
    wandb: WandbConfig
    comet: CometConfig

    @property
    def enabled(self) -> bool:
        """Whether any monitor is enabled."""
        return any(each.enabled for each in (self.tensorboard, self.csv_monitor, self.wandb, self.comet))


def get_monitor_config(param_dict: Any) -> DeepSpeedMonitorConfig:
    """Returns the sections of a configuration (dict, path, base64 or parsed); absent ones are disabled."""

    def read(name: str, section: type[Any]) -> Any:
        return parse_section(param_dict, name) or section()

    return DeepSpeedMonitorConfig(
        tensorboard=read("tensorboard", TensorBoardConfig),
        csv_monitor=read("csv_monitor", CSVConfig),
        wandb=read("wandb", WandbConfig),
        comet=read("comet", CometConfig),
    )


class WandbMonitor(Monitor):
    """Logs to the present run of wandb, or to a new one of ``wandb.init``."""

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
        """Logs a script's own values with ``Run.log``; does nothing on other ranks than 0."""
        if self.enabled:
            self._ensure_open()
            self._run.log(data, step=step, commit=commit)

    def _write(self, events: Sequence[Event]) -> None:
        for step, values in by_step(events):
            self._run.log(values, step=step)

    def _close(self) -> None:
        if self._owns_run:
            self._run.finish()


FLUSH_SECONDS = 10
"""Seconds after which TensorBoard's own thread flushes its queue."""


class TensorBoardMonitor(Monitor):
    """Writes event files below ``<output_path>/<job_name>``."""

    section = "tensorboard"

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config.enabled)
        if self.enabled:
            require_package("tensorboard", self.section)
        self.output_path = tensorboard_config.output_path
        self.job_name = tensorboard_config.job_name
        self.log_dir = log_folder(tensorboard_config)
        self._writer: Any = None

    @property
    def summary_writer(self) -> Any:
        """Returns torch's ``SummaryWriter``, for a script's own images and texts; None on ranks that write nothing."""
        if not self.enabled:
            return None
        self._ensure_open()
        return self._writer

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(self.log_dir), flush_secs=FLUSH_SECONDS)

    def _write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._writer.add_scalar(name, value, step)

    def _flush(self) -> None:
        self._writer.flush()

    def _close(self) -> None:
        self._writer.close()


def _is_of_other_name(path: Path, name: str) -> bool:
    """Returns whether ``path`` has the columns of another name than ``name`` that also becomes this file name."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first, _, column = file.readline().rstrip("\n").partition(",")
    except FileNotFoundError:
        return False
    # Any other first line is not by this class, and tells nothing about the name.
    return first == "step" and column != name.rpartition("/")[2] and f"_{path.stem}".endswith(f"_{column}")


class csvMonitor(Monitor):  # noqa: N801 - the name that programs import
    """Writes ``<output_path>/<job_name>/<name>.csv`` with the columns ``step`` and the name's last part.

    Slashes in names become underscores. Of two names that then are the same, as ``a/b`` and ``a_b``, the first one
    written has the file; the other one has a file with a number made from its name. Rows are appended to existing
    files, so a resumed run continues them, each name in the file that it had. It knows this by the columns: a name
    that only the resumed run writes is mistaken for one of the same last part, as ``a_b/c`` for ``a/b/c``. The rows of
    a call are in the file when it returns.
    """

    section = "csv_monitor"

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config.enabled)
        self.output_path = csv_config.output_path
        self.job_name = csv_config.job_name
        self.log_dir = log_folder(csv_config)
        self._files: dict[str, TextIO] = {}
        self._names: dict[str, str] = {}  # file name -> the name that has it

    def _open(self) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)

    def _file(self, name: str) -> TextIO:
        file = self._files.get(name)
        if file is None:
            file = self._path(name).open("a", encoding="utf-8", newline="")
            if file.tell() == 0:
                file.write(f"step,{name.rpartition('/')[2]}\n")
            self._files[name] = file
        return file

    def _path(self, name: str) -> Path:
        """Returns the file of a name, by the names written so far and the files of the folder."""
        stem = name.replace("/", "_")
        plain = self.log_dir / f"{stem}.csv"
        numbered = self.log_dir / f"{stem}.{zlib.crc32(name.encode()):08x}.csv"
        if numbered.exists() or self._names.get(stem, name) != name or _is_of_other_name(plain, name):
            return numbered
        self._names[stem] = name
        return plain

    def _write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._file(name).write(f"{step},{value}\n")
        self._flush()

    def _flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def _close(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            file.close()


class CometMonitor(Monitor):
    """Logs to an experiment that ``comet_ml.start`` opens or continues.

    Events are reported when ``samples_log_interval`` samples have passed since the last report; values in between are
    left out.
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

        if self._experiment is not None:  # it was closed: continue the same experiment
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


_KINDS: dict[str, type[Any]] = {
    "tensorboard": TensorBoardMonitor,
    "csv_monitor": csvMonitor,
    "wandb": WandbMonitor,
    "comet": CometMonitor,
}


def _section(config: Any, name: str) -> Any:
    return getattr(config, name) if hasattr(config, name) else parse_section(config, name)


def _close_all(monitors: Sequence[Monitor]) -> None:
    for monitor in monitors:
        monitor.close()


class MonitorMaster:
    """Writes events to every monitor that the configuration enables, from rank 0.

    Args:
        monitor_config: A ``ds_config`` (dict, path, base64 or parsed), or any object with the attributes
            ``tensorboard``, ``csv_monitor``, ``wandb`` and ``comet``.

    Raises:
        DeepSpeedConfigError: The package of a monitor is not installed; raised on every rank.
    """

    def __init__(self, monitor_config: Any) -> None:
        sections = {name: _section(monitor_config, name) for name in _KINDS}
        enabled = {name: section for name, section in sections.items() if section is not None and section.enabled}
        self.enabled = bool(enabled)  # whether any monitor is enabled in the configuration; the same on every rank
        # Built on every rank to check their packages; only rank 0 writes.
        built: dict[str, Monitor] = {name: _KINDS[name](section) for name, section in enabled.items()}
        # the TensorBoard monitor, or None; likewise ``csv_monitor``, ``wandb_monitor`` and ``comet_monitor``
        self.tb_monitor = built.get("tensorboard")
        self.csv_monitor = built.get("csv_monitor")
        self.wandb_monitor = built.get("wandb")
        self.comet_monitor = built.get("comet")
        self._writes = not comm.is_initialized() or comm.get_rank() == 0
        for monitor in built.values():
            monitor.enabled = self._writes
        self._monitors = tuple(built.values()) if self._writes else ()
        # Also at exit: otherwise TensorBoard's thread ends with unwritten events.
        weakref.finalize(self, _close_all, self._monitors)

    @property
    def writes(self) -> bool:
        """Whether this rank writes anything."""
        return bool(self._monitors)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes ``(name, value, step)`` events on rank 0; does nothing on other ranks."""
        for monitor in self._monitors:
            monitor.write_events(event_list)

    def flush(self) -> None:
        """Makes all events written so far visible to readers."""
        for monitor in self._monitors:
            monitor.flush()

    def close(self) -> None:
        """Flushes and closes files and connections; the next event opens them again."""
        _close_all(self._monitors)


__all__ = ["CometMonitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]
