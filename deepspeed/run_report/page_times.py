"""Writes the page of a run at its end, after a kill, or when the next start begins."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepspeed.errors import DeepSpeedError
from deepspeed.exit_notes import ExitNotes
from deepspeed.logging import log_dist
from deepspeed.run_report.page import write_report
from deepspeed.run_report.rank_file import PATTERN, has_end

_PATIENCE = 2.0  # seconds
_SMALL = 64 << 20  # bytes that are read in a second or two


class StandbyWriter:
    """Writes the page of a run when this process is gone before it has done so itself, as after SIGKILL.

    A shell waits for the end of a pipe that this process holds open: about 1 MB, and no processor time. Its session is
    its own, so that signals to the ranks spare it. It ends with this process, or after the page is written.

    Args:
        folder: ``run_report.path`` of the run.
    """

    # Signals to all processes of a machine that shuts down or of a job that is cancelled come at just this time.
    _WAIT = 'trap "" HUP INT TERM; read -r done || exec "$0" -m deepspeed.cli.report_run "$1"'

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", self._WAIT, sys.executable, str(folder.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # whoever reads the output of the ranks must see its end when they end
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=Path(__file__).parents[2],  # where -m finds this package, however the program found it
        )

    def cancel(self) -> None:
        """Ends the shell: the page is written."""
        with contextlib.suppress(BrokenPipeError):  # someone has killed the shell
            self._process.communicate(b"done\n")


def report_at_end(folder: Path, rank: int, has_failed: bool, standby: StandbyWriter | None = None) -> None:
    """Writes the report of a run that ends, or prints how to do so where reading the files would hold up the end.

    Rank 0 does it, and a rank that has failed, as the others may be killed now.

    Args:
        folder: ``run_report.path`` of the run.
        rank: That ends.
        has_failed: Whether an exception ends it.
        standby: What would write the page if this process were killed; cancelled when it is written.
    """
    if rank == 0:
        _await_ends(folder)
        _report_if_small(folder, rank)
        ExitNotes.here().run_report_written()
        if standby is not None:
            standby.cancel()
    elif has_failed:
        with _sole_writer(folder) as is_sole:
            if is_sole:
                _report_if_small(folder, rank)


def report_of_earlier_start(folder: Path) -> None:
    """Writes the report of a start that was killed before it did, when the next one begins. Rank 0 calls it.

    Nothing happens where no rank has written after the page.

    Args:
        folder: ``run_report.path`` of the run, before a rank of the new start opens its file.
    """
    written = [path.stat().st_mtime_ns for path in folder.glob(PATTERN)]
    page = folder / "report.html"
    if not written or (page.exists() and page.stat().st_mtime_ns >= max(written)):
        return
    try:
        _report_if_small(folder, 0)
    except DeepSpeedError as error:  # of a damaged file of that start, which must not hold up this one
        log_dist(f"run report: no page about the start before this one: {error}", level=30)


def _await_ends(folder: Path) -> None:
    """Waits a moment for the other ranks to end their files, as they do when all is well."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and not all(map(has_end, folder.glob(PATTERN))):
        time.sleep(0.05)


@contextmanager
def _sole_writer(folder: Path) -> Iterator[bool]:
    """Yields False while another rank is inside: of a thousand ranks that fail together, few shall read all files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_sole = True
        except OSError:  # taken, or a file system without locks
            is_sole = False
        yield is_sole
    finally:
        os.close(descriptor)


def _report_if_small(folder: Path, rank: int) -> None:
    nbytes = sum(path.stat().st_size for path in folder.glob(PATTERN))
    if nbytes > _SMALL:
        log_dist(f"run report: {nbytes / 2**20:,.0f} MiB to read; run ds_report_run {folder}", ranks=[rank])
    else:
        log_dist(f"run report: {write_report(folder)}", ranks=[rank])
