"""Writes the page of a run at its end, after its rank 0 was killed, or at the next start."""

from __future__ import annotations

import contextlib
import fcntl
import logging
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

_WAIT_SECONDS = 2.0  # for the other ranks to close their files
_MAX_BYTES = 64 << 20  # these are read in a second or two


class StandbyWriter:
    """Writes the page of a run if this process ends before writing it, as after SIGKILL.

    A shell of about 1 MB waits for the end of a pipe that this process holds open, and then writes the page. It has a
    session of its own, so that it does not get signals to the ranks. :meth:`cancel` ends it.
    """

    # A machine that shuts down, or a cancelled job, signals all processes: the shell must survive that.
    _WAIT = 'trap "" HUP INT TERM; read -r done || exec "$0" -m deepspeed.cli.report_run "$1"'

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", self._WAIT, sys.executable, str(folder.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # otherwise a reader of the ranks' output would wait for the shell
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=Path(__file__).parents[2],  # so that -m finds this package
        )

    def cancel(self) -> None:
        """Ends the shell without writing the page."""
        with contextlib.suppress(BrokenPipeError):  # the shell was killed
            self._process.communicate(b"done\n")


def report_at_end(folder: Path, rank: int, has_failed: bool, standby: StandbyWriter | None = None) -> None:
    """Writes the report of a run that ends, or logs the command that writes it if the files are too large to wait for.

    Rank 0 writes it, and so does a rank that has failed, because the launcher may kill the others.

    ``standby`` is cancelled once the page is written.
    """
    if rank == 0:
        deadline = time.monotonic() + _WAIT_SECONDS  # for the other ranks to close their files
        while time.monotonic() < deadline and not all(map(has_end, folder.glob(PATTERN))):
            time.sleep(0.05)
        _report_if_small(folder, rank)
        ExitNotes.here().run_report_written()
        if standby is not None:
            standby.cancel()
    elif has_failed:
        with _sole_writer(folder) as is_sole:
            if is_sole:
                _report_if_small(folder, rank)


def report_of_earlier_start(folder: Path) -> None:
    """Writes the report of the previous start if its ranks have written after the page. Rank 0 calls it."""
    written = [path.stat().st_mtime_ns for path in folder.glob(PATTERN)]
    page = folder / "report.html"
    if not written or (page.exists() and page.stat().st_mtime_ns >= max(written)):
        return
    _report_if_small(folder, 0)


@contextmanager
def _sole_writer(folder: Path) -> Iterator[bool]:
    """Yields False while another rank is inside, so that few of a thousand failed ranks read all files."""
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
    if nbytes > _MAX_BYTES:
        log_dist(f"run report: {nbytes / 2**20:,.0f} MiB to read; run ds_report_run {folder}", ranks=[rank])
        return
    try:
        log_dist(f"run report: {write_report(folder)}", ranks=[rank])
    except DeepSpeedError as error:  # must stop neither a program that has ended well, nor the next start
        log_dist(f"run report: no page was written: {error}", ranks=[rank], level=logging.WARNING)
