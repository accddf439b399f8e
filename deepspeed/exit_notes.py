"""What ranks and their launcher tell each other through a folder: who has ended how, and whom the others do without.

Without a launcher of this package there is no folder, and nothing is written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

NOTES = "DEEPSPEED_ELASTIC_NOTES"
"""Environment variable with the folder, set by the launcher."""

_CONTINUES = "continues"
_EXIT, _RECOVERED = "exit-", "recovered-"
_LOOK_SECONDS, _PAUSE = 0.3, 0.02


class ExitNotes:
    """The folder.

    Args:
        folder: Where it is; None: there is none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def here(cls) -> ExitNotes:
        """Returns that of this process's launcher."""
        found = os.environ.get(NOTES)
        return cls(Path(found) if found else None)

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def continues(self) -> None:
        """Says that the other ranks go on when one is lost."""
        self._write(_CONTINUES, "")

    def recovered(self, pids: Sequence[int]) -> None:
        """Says that the run goes on without these processes."""
        for pid in pids:
            self._write(f"{_RECOVERED}{pid}", "")

    def cause_of(self, pid: int) -> str:
        """Returns how a process has ended, in the launcher's words; empty if it has not said it."""
        if self._folder is None:
            return ""
        path, deadline = self._folder / f"{_EXIT}{pid}", time.monotonic() + _LOOK_SECONDS
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        return path.read_text() if path.exists() else ""

    # -- the launcher --------------------------------------------------------------------------------------------------

    def note_exit(self, pid: int, cause: str) -> None:
        """Says how a process has ended."""
        self._write(f"{_EXIT}{pid}", cause)

    @property
    def do_continue(self) -> bool:
        """Whether the ranks have said that the others go on when one is lost."""
        return self._folder is not None and (self._folder / _CONTINUES).exists()

    def is_recovered(self, pid: int) -> bool:
        """Whether the run goes on without a process."""
        return self._folder is not None and (self._folder / f"{_RECOVERED}{pid}").exists()

    def _write(self, name: str, text: str) -> None:
        if self._folder is None or not self._folder.is_dir():
            return
        path = self._folder / f".{name}.{os.getpid()}"
        path.write_text(text)
        path.replace(self._folder / name)
