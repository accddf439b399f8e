"""``csv_monitor``: one CSV file per event name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from deepspeed.monitor.sink import Event, Monitor, log_folder


class csvMonitor(Monitor):  # noqa: N801 - the name that programs import
    """Writes ``<output_path>/<job_name>/<name>.csv`` with the columns ``step`` and the name's last part.

    Slashes in a file's name become underscores. Files that exist are continued, so a resumed run goes on where it
    stopped; each call's rows are in the file when it returns.

    Args:
        csv_config: The section: ``enabled``, ``output_path``, ``job_name``.
    """

    section = "csv_monitor"

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config.enabled)
        self.output_path = csv_config.output_path
        self.job_name = csv_config.job_name
        self.log_dir = log_folder(csv_config)
        self._files: dict[str, TextIO] = {}

    def _open(self) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)

    def _file(self, name: str) -> TextIO:
        file = self._files.get(name)
        if file is None:
            file = (self.log_dir / f"{name.replace('/', '_')}.csv").open("a", encoding="utf-8", newline="")
            if file.tell() == 0:
                file.write(f"step,{name.rpartition('/')[2]}\n")
            self._files[name] = file
        return file

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
