"""Finds and ends processes: descendants of this one, and those in the sessions of the ranks."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02
_KILL_SECONDS = 5.0


def _prctl(option: int, value: int) -> bool:
    """Sets a process attribute; returns False where that is not supported (only Linux supports it)."""
    if not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0


def adopt_orphans(enabled: bool = True) -> bool:
    """Makes this process the parent of descendants whose own parent dies, so that they can still be found."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, int(enabled))


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies; exits at once if that has already happened.

    This works even if supervisor and front are killed together.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def find_processes(sessions: Iterable[int], spare: Iterable[int] = ()) -> set[int]:
    """Returns the ids of descendants and of processes in ``sessions``, without ``spare`` and zombies.

    The tree finds children that left their session; the sessions find children whose parent is gone, on systems where
    orphans cannot be adopted.
    """
    me = os.getpid()
    ids = set(sessions)
    found = {child.pid for child in psutil.Process(me).children(recursive=True)}
    for pid in psutil.pids() if ids else ():
        try:
            if os.getsid(pid) in ids:
                found.add(pid)
        except (ProcessLookupError, PermissionError):  # ended meanwhile, or belongs to another user
            continue
    return {pid for pid in found - set(spare) - {me} if _is_running(pid)}


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(pids: Iterable[int], number: int) -> None:
    """Sends a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):  # ended, or became another user's (sudo)
            continue


def send_groups(groups: Iterable[int], number: int) -> None:
    """Sends a signal to each process group that still exists."""
    for group in groups:
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):  # macOS reports a group of zombies as not permitted
            continue


def end_processes(find: Callable[[], set[int]], reap: Callable[[], None], patience: float) -> set[int]:
    """Ends all processes that ``find`` returns: TERM, then KILL after ``patience`` seconds, until none is left.

    Args:
        find: The processes that still run; called repeatedly, because a dying process may start another one.

    Returns:
        Processes that not even KILL ended in time (stuck inside the kernel); normally empty.
    """
    send(find(), signal.SIGTERM)
    deadline = time.monotonic() + patience
    while (left := _after(reap, find)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    deadline = time.monotonic() + _KILL_SECONDS
    while left and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        left = _after(reap, find)
    return left


def _after(reap: Callable[[], None], find: Callable[[], set[int]]) -> set[int]:
    reap()
    return find()
