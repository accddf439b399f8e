"""Exchanges by files what ranks and launcher must know of each other outside of the rendezvous.

That is how ranks ended, who continues without them, missing reports, and at which port rank 0 serves the rendezvous.

Without a launcher of this package there is no folder, and nothing is written.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

NOTES = "DEEPSPEED_ELASTIC_NOTES"
"""Environment variable with the folder, set by the launcher."""

LOST_PEER = re.compile(
    rb"Connection (closed|reset) by peer|Broken pipe|Connection refused|CommunicationError|DistNetworkError|"
    rb"DistStoreError|DistBackendError|remote process exited|NCCL communicator was aborted|KeyboardInterrupt|recvBytes|"
    rb"recvValue|Socket Timeout|Timed out waiting|gloo.*[Tt]imeout",
)
"""Matches errors of a rank whose cause is that another rank is gone."""

_CONTINUES = "continues"
_EXIT, _RECOVERED = "exit-", "recovered-"
_REPORT = "run-report"
_WHOLE, _RENDEZVOUS = "whole-run", "rendezvous-"
_WAIT_SECONDS, _PAUSE = 0.3, 0.02


class ExitNotes:
    """Reads and writes the files."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def here(cls) -> ExitNotes:
        """Returns the notes in the folder of this process's launcher."""
        found = os.environ.get(NOTES)
        return cls(Path(found) if found else None)

    @property
    def has_launcher(self) -> bool:
        """Whether a launcher of this package reads the files."""
        return self._folder is not None

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def continues(self) -> None:
        """Writes that the other ranks continue when one is lost."""
        self._write(_CONTINUES)

    def recovered(self, pids: Sequence[int]) -> None:
        """Writes that the run continues without these processes."""
        for pid in pids:
            self._write(f"{_RECOVERED}{pid}")

    def cause_of(self, pid: int) -> str:
        """Returns how a process has ended, as its launcher wrote; waits up to 0.3 s. Empty if unknown."""
        if self._folder is None:
            return ""
        path, deadline = self._folder / f"{_EXIT}{pid}", time.monotonic() + _WAIT_SECONDS
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def run_report_missing(self, folder: Path) -> None:
        """Writes that the page of the run report in ``folder`` is missing."""
        self._write(_REPORT, os.fsencode(folder.resolve()))

    def run_report_written(self) -> None:
        """Removes the note of :meth:`run_report_missing`."""
        if self._folder is not None:
            (self._folder / _REPORT).unlink(missing_ok=True)

    @property
    def has_whole_run(self) -> bool:
        """Whether all ranks of the run read the files of this launcher."""
        return self._folder is not None and (self._folder / _WHOLE).exists()

    def serves(self, wanted: int, port: int) -> None:
        """Writes that rank 0 serves at ``port`` the rendezvous that was to be at port ``wanted``."""
        for each in (port, wanted):  # ``port`` first, so that the files lead from any port to one that is served
            self._write(f"{_RENDEZVOUS}{each}", str(port).encode())

    def port_of(self, wanted: int) -> int | None:
        """Returns the port at which rank 0 serves the rendezvous of port ``wanted``; None: it does not yet.

        Without a launcher that has started the whole run it is ``wanted`` itself.
        """
        if self._folder is None or not self.has_whole_run:
            return wanted
        port, further = None, wanted
        while further != port and (path := self._folder / f"{_RENDEZVOUS}{further}").exists():
            port, further = further, int(path.read_text())
        return port

    # -- the launcher --------------------------------------------------------------------------------------------------

    def starts_whole_run(self) -> None:
        """Writes that all ranks of the run read these files."""
        self._write(_WHOLE)

    def note_exit(self, pid: int, cause: str) -> None:
        """Writes how a process has ended. Raises OSError: it cannot be written."""
        self._write(f"{_EXIT}{pid}", cause.encode(errors="replace"))

    @property
    def do_continue(self) -> bool:
        """Whether a rank has written that the others continue when one is lost."""
        return self._folder is not None and (self._folder / _CONTINUES).exists()

    def is_recovered(self, pid: int) -> bool:
        """Returns whether a rank has written that the run continues without this process."""
        return self._folder is not None and (self._folder / f"{_RECOVERED}{pid}").exists()

    @property
    def missing_run_report(self) -> Path | None:
        """The folder of the run report whose page is missing; None: no page is missing."""
        path = None if self._folder is None else self._folder / _REPORT
        return Path(os.fsdecode(path.read_bytes())) if path is not None and path.exists() else None

    def _write(self, name: str, text: bytes = b"") -> None:
        if self._folder is None or not self._folder.is_dir():
            return
        path = self._folder / f".{name}.{os.getpid()}"
        path.write_bytes(text)
        path.replace(self._folder / name)
