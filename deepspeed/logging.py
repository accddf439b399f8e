"""The package logger. Only rank 0 logs, unless a caller names other ranks.

Lines on a terminal begin with the time; lines that go elsewhere (a file, a pipe) with the rank and the date.
``DEEPSPEED_LOG_FORMAT`` sets the form. Handlers of the root logger, which a program configures, get every line too; one
that writes to the console replaces this package's own output.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
_seen: set[str] = set()
# Control characters (C0, C1, DEL) except line feed and tab. They can move the cursor or reprogram a terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


FORMAT_VARIABLE = "DEEPSPEED_LOG_FORMAT"
TERMINAL, FILE, JSON = "terminal", "file", "json"
"""Values of the variable; others are formats of :class:`logging.Formatter`, with ``%(rank)s`` and ``%(source)s``."""
JSON_START = '{"time": '
"""Begins a line of the format ``json``."""


class _CurrentStderr(logging.StreamHandler):
    """Writes to the present ``sys.stderr``, so that captured and redirected streams get the lines."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    @property
    def stream(self):  # type: ignore[no-untyped-def, override]
        return sys.stderr

    @stream.setter
    def stream(self, _value) -> None:  # type: ignore[no-untyped-def]
        pass

    def emit(self, record: logging.LogRecord) -> None:
        if not any(map(_writes_to_console, logging.getLogger().handlers)):
            super().emit(record)


def _writes_to_console(handler: logging.Handler) -> bool:
    consoles = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    stream = getattr(handler, "stream", None)
    return hasattr(handler, "console") or (stream is not None and stream in consoles)  # the first is rich's


_COLORS = {"WARNING": 33, "ERROR": 31, "CRITICAL": 31}


def takes_color(is_terminal: bool) -> bool:
    """Returns whether lines may be colored: on a terminal, unless ``NO_COLOR`` is set or ``TERM`` is "dumb"."""
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def with_color(line: str) -> str:
    """Returns a log line with its level in color, if it is a warning or worse."""
    for level, color in _COLORS.items():
        if f"] [{level}] " in line[:64]:
            return line.replace(f"[{level}]", f"\x1b[{color}m[{level}]\x1b[0m", 1)
    return line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "rank": record.__dict__["rank"],
            "source": record.__dict__["source"],
            "message": record.getMessage(),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values)


@lru_cache
def _formatter_of(form: str) -> logging.Formatter:
    """Returns the formatter of a value of ``DEEPSPEED_LOG_FORMAT``."""
    if form == JSON:
        return _JsonFormatter()
    if form == TERMINAL:
        return logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s", datefmt="%H:%M:%S")
    date = "%Y-%m-%d %H:%M:%S"
    if form == FILE:
        return logging.Formatter("[%(source)s] [%(asctime)s] [%(levelname)s] %(message)s", datefmt=date)
    made = logging.Formatter(form, datefmt=date)
    made.format(_with_source(logging.LogRecord("", 0, "", 0, "", None, None)))
    return made


def _with_source(record: logging.LogRecord) -> logging.LogRecord:
    """Returns a copy with the attributes ``rank`` and ``source``, and without the rank in the message."""
    found = copy.copy(record)
    rank = _rank() if _command is None else None
    source = f"rank {rank}" if _command is None else _command
    found.__dict__.update(rank=rank, source=source, msg=record.getMessage().removeprefix(f"[{source}] "), args=None)
    return found


class _LineFormatter(logging.Formatter):
    """Formats a line for where it goes: colors the level on a terminal, but not in files."""

    def format(self, record: logging.LogRecord) -> str:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        form = os.environ.get(FORMAT_VARIABLE) or (TERMINAL if is_terminal else FILE)
        try:
            formatter = _formatter_of(form)
        except (ValueError, KeyError, TypeError):  # set_default_log_level has reported it
            formatter = _formatter_of(FILE)
        text = formatter.format(record if form == TERMINAL else _with_source(record))
        return with_color(text) if takes_color(is_terminal) else text


_command: str | None = None


def name_source(command: str | None) -> None:
    """Sets what lines name as their source: a command of this package; None: the rank."""
    global _command
    _command = command


def _create_logger() -> logging.Logger:
    created = logging.getLogger("DeepSpeed")
    if not created.handlers:
        handler = _CurrentStderr()
        handler.setFormatter(_LineFormatter())
        created.addHandler(handler)
    return created


def set_default_log_level() -> None:
    """Sets the level to that of ``DEEPSPEED_LOG_LEVEL``, or to info without it; checks ``DEEPSPEED_LOG_FORMAT``."""
    text = os.environ.get("DEEPSPEED_LOG_LEVEL") or "info"
    logger.setLevel(_LEVELS.get(text.lower(), logging.INFO))
    if text.lower() not in _LEVELS:
        log_dist(
            f"DEEPSPEED_LOG_LEVEL={printable(text)}: expected one of {', '.join(_LEVELS)}; info is used. Correct it",
            level=logging.WARNING,
        )
    form = os.environ.get(FORMAT_VARIABLE)
    try:
        _formatter_of(form or FILE)
    except (ValueError, KeyError, TypeError) as error:
        log_dist(
            f"{FORMAT_VARIABLE}={printable(form or '')}: expected {TERMINAL}, {FILE}, {JSON}, or a format of Python's "
            f"logging with the attributes of its records, rank and source, found {error}; {FILE} is used. Correct it",
            level=logging.WARNING,
        )


logger = _create_logger()


def _rank() -> int:
    """Returns the global rank from the environment; the logger must work before any process group exists."""
    return int(os.environ.get("RANK", "0") or 0)


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Logs ``message`` on the given ranks. ``ranks``: ranks that log; None: rank 0; a list with -1: all."""
    log_ranks = list(ranks) if ranks else [0]
    rank = _rank()
    if -1 in log_ranks or rank in log_ranks:
        logger.log(level, message if log_ranks == [0] else f"[rank {rank}] {message}")


def print_dist(message: str, ranks: Iterable[int] | None = None) -> None:
    """Writes ``message`` to standard output on the given ranks, without time and level; None: on all."""
    if ranks is None or -1 in (chosen := list(ranks)) or _rank() in chosen:
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()


def should_log_le(max_log_level_str: str) -> bool:
    """Returns whether the logger's level is at most a named one. Raises ValueError: there is no level of that name."""
    return logger.getEffectiveLevel() <= _level_of(max_log_level_str)


def log_dist_once(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Logs ``message`` on the given ranks, once per process; see :func:`log_dist`."""
    if message not in _seen:
        _seen.add(message)
        log_dist(message, ranks, level)


def warn_once(key: str, message: str, ranks: Iterable[int] | None = None) -> None:
    """Warns on rank 0 (or ``ranks``), once per process for each ``key``."""
    if key not in _seen:
        _seen.add(key)
        log_dist(message, ranks, logging.WARNING)


def set_log_level_from_string(text: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets the level by name: debug, info, warning, error or critical. Raises ValueError: ``text`` is another one."""
    (custom_logger or logger).setLevel(_level_of(text))


def _level_of(text: str) -> int:
    level = _LEVELS.get(text.lower())
    if level is None:
        raise ValueError(f"log level {text!r} is unknown; choose one of {', '.join(_LEVELS)}")
    return level


@contextmanager
def quiet() -> Iterator[None]:
    """Logs only errors inside the context; messages that are logged once can still be logged later."""
    level, seen = logger.level, set(_seen)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        _seen.clear()
        _seen.update(seen)


def printable(text: str) -> str:
    """Returns ``text`` with "?" in place of control characters other than line feed and tab."""
    return _CONTROL.sub("?", text)


set_default_log_level()
