"""Detects that the process of another rank on this machine has ended."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = "/proc/self/ns/pid"
_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat behind the name of the program
_ENDED = ("Z", "X")


def this_process() -> str:
    """Returns a name of this process for :func:`has_ended`; unique over all machines."""
    pid = os.getpid()
    machine = _machine(pid)
    return json.dumps([machine, pid, _stat(pid)[_STARTED] if machine else ""])


def has_ended(process: str) -> bool:
    """Returns whether a process, named by :func:`this_process`, has ended; False if it runs on another machine."""
    try:
        machine, pid, started = json.loads(process)
    except (ValueError, TypeError):  # any process that reaches the store may write to it
        return False
    if not machine or machine != _machine(os.getpid()) or type(pid) is not int:
        return False
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[_STARTED] != started or fields[_STATE] in _ENDED


@lru_cache(maxsize=1)
def _machine(pid: int) -> str:
    """Returns a name of the scope of process ids: the boot of a machine and the container; empty if not on Linux.

    ``pid``, that of this process, keeps a forked process from the cached name.
    """
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink(_NAMESPACE)}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    # The name of the program stands in parentheses and may hold any character.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
