"""Runs the commands of this package: each ends with an exit code, or one sentence about a user's mistake.

A command is a function ``main(args=None)``. ``args`` is the command line without the command's name; None means that of
this process. :func:`run_command` states how ``main`` ends.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence

from deepspeed.command_output import run_and_flush
from deepspeed.errors import DeepSpeedError
from deepspeed.logging import name_source


def run_command(
    name: str, work: Callable[[], int | None], args: Sequence[str] | None, *, keeps_output: bool = False
) -> None:
    """Runs the body of a command's ``main(args)``.

    Args:
        work: Parses and executes the command line; returns the exit code (None means 0).
        args: The argument of ``main``. None: the process's command line is used, and the process exits.
        keeps_output: Leave standard output as it is, since forked ranks inherit it; otherwise it prints "?" for
            characters that its encoding lacks.

    Raises:
        DeepSpeedError: ``work`` failed, and ``args`` was given.
        SystemExit: ``work`` failed without ``args``, or the exit code is not 0.
    """
    if args is not None:
        code = work()
    else:
        name_source(name)
        if not keeps_output and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        code = run_and_flush(name, lambda: _guarded(name, work))
    if code:
        sys.exit(code)


def _guarded(name: str, work: Callable[[], int | None]) -> int | None:
    try:
        return work()
    except KeyboardInterrupt:
        sys.exit(130)  # the shells' exit code for Ctrl-C
    except DeepSpeedError as error:
        sys.exit(f"{name}: {error}")
