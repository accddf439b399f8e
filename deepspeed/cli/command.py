"""How every command of this package ends: with an exit code, or with one sentence about what the user got wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from deepspeed.errors import DeepSpeedError


def run_command(name: str, work: Callable[[], int | None], args: Sequence[str] | None) -> None:
    """Does the work of a command's ``main(args)``.

    Args:
        name: What the sentence begins with.
        work: Reads the command line and executes it; returns the exit code, None standing for 0.
        args: What ``main`` was given: None if it is the process's own command line, so that the process is ours to end.

    Raises:
        DeepSpeedError: ``work`` failed, and ``args`` was given: the error goes to the caller.
        SystemExit: The same without ``args``; or the exit code is not 0.
    """
    try:
        code = work()
    except KeyboardInterrupt:
        if args is not None:
            raise
        sys.exit(130)  # as shells report Ctrl-C, without a traceback
    except DeepSpeedError as error:
        if args is not None:
            raise
        sys.exit(f"{name}: {error}")
    if code:
        sys.exit(code)
