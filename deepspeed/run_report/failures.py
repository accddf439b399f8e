"""Records and finds failures of ranks: exceptions that ended a program, and ranks that were killed."""

from __future__ import annotations

import platform
import sys
from typing import Any

import psutil

from deepspeed.exit_notes import LOST_PEER
from deepspeed.run_report.run_data import Line, RankRun, RunData

FAILURE = "failure"
"""Name of the events of failures."""

_KILLED = "the rank was killed (SIGTERM, SIGKILL), or its machine was lost"
_MAX_MESSAGE = 2000  # characters; the rest of a message is cut off


def uncaught_exception() -> BaseException | None:
    """Returns the uncaught exception that Python reported last; None if there is none."""
    return getattr(sys, "last_value", None)


def describe_exception(ignored: BaseException | None) -> dict[str, Any]:
    """Returns ``error`` (the type) and ``message`` of the exception that ends the program; empty without one.

    Args:
        ignored: The result of :func:`uncaught_exception` at the start: a notebook keeps the errors of earlier cells.
    """
    error = sys.exc_info()[1]  # set if a finally, an except or a with closes the file
    if error is None and (error := uncaught_exception()) is ignored:
        return {}
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return {}
    return {"error": type(error).__name__, "message": str(error)[:_MAX_MESSAGE]}


def find_failures(run: RunData) -> list[Line]:
    """Returns the failures of all starts: each has ``time``, ``rank``, ``text`` and, if known, ``step``.

    Exceptions come first, unless they only report that another rank is gone: launchers kill the other ranks after one
    has failed. Otherwise the order is that of time. A killed rank of an earlier start has ``restarted``.
    """
    found = [
        _failure(number, event, f"{event['error']}: {event['message']}".rstrip(": "))
        for number, rank in run.ranks.items()
        for event in rank.events
        if event["name"] == FAILURE
    ]
    for number, rank in run.ranks.items():
        found += [{**_failure(number, line, _KILLED), "restarted": True} for line in rank.breaks]
        if not rank.has_ended and rank.starts and _is_gone(run, rank):
            found.append(_failure(number, rank.last_line, _KILLED))
    is_effect = {id(f): f["text"].endswith(_KILLED) or LOST_PEER.search(f["text"].encode()) is not None for f in found}
    return sorted(found, key=lambda failure: (is_effect[id(failure)], failure["time"]))


def _failure(rank: int, line: Line, what: str) -> Line:
    step = line.get("step")
    where = f"after step {step}" if step is not None else "before its first step was written"
    found = {"kind": "event", "name": FAILURE, "time": line["time"], "rank": rank, "text": f"failed {where}: {what}"}
    return found if step is None else {**found, "step": step}


def _is_gone(run: RunData, rank: RankRun) -> bool:
    """Returns whether a rank that has not closed its file is gone, by its process or by the other ranks' files."""
    pid, host = rank.facts.get("pid"), rank.facts.get("host")
    if pid is not None and host == platform.node():
        try:
            process = psutil.Process(pid)
            return process.status() == psutil.STATUS_ZOMBIE or process.create_time() > rank.starts[-1]
        except psutil.NoSuchProcess:
            return True
    last = max(rank.steps, default=0)
    return any(
        other.has_ended and (any(e["name"] == FAILURE for e in other.events) or max(other.steps, default=0) > last)
        for other in run.ranks.values()
        if other is not rank
    )
