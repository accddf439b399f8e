"""What every monitor is: it takes events and writes them somewhere, and its trouble never becomes the training's."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import logger

Event: TypeAlias = tuple[str, float, int]
"""``(name, value, step)``. The engine's steps are samples seen so far, over all ranks."""


class Monitor:
    """One place that events are written to; lives on rank 0 only.

    The public methods own the question whether anything is written at all and the handling of failures; a subclass
    writes its own ``_open``, ``_write``, ``_flush`` and ``_close``. The place is opened with the first event, so that
    an engine which never trains leaves nothing behind.

    Attributes:
        section: Name of its section of the configuration.
        enabled: Whether events are written; False after the first failure.
    """

    section = ""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._is_open = False

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes events, oldest first.

        A failure (a full disk, a service that cannot be reached) is logged once and switches this monitor off: it is
        no reason to lose the training.
        """
        if self.enabled and event_list:
            with self._giving_up_on_failure():
                self._ensure_open()
                self._write(event_list)

    def flush(self) -> None:
        """Brings everything written so far to where a reader sees it."""
        if self.enabled and self._is_open:
            with self._giving_up_on_failure():
                self._flush()

    def close(self) -> None:
        """Flushes and lets go of files and connections; the next event opens them again."""
        if self.enabled and self._is_open:
            self._is_open = False
            with self._giving_up_on_failure():
                self._close()

    @contextmanager
    def _giving_up_on_failure(self) -> Iterator[None]:
        """Switches this monitor off, with one line, if anything inside fails."""
        try:
            yield
        except Exception as error:
            self.enabled = False
            logger.warning(
                f"{self.section}: writing failed with {type(error).__name__}: {error}. This monitor is off from now "
                "on; training continues"
            )

    def _ensure_open(self) -> None:
        if not self._is_open:
            self._open()
            self._is_open = True

    def _open(self) -> None:
        """Opens files or connections."""

    def _write(self, events: Sequence[Event]) -> None:
        """Writes events."""
        raise NotImplementedError

    def _flush(self) -> None:
        """Makes what was written visible."""

    def _close(self) -> None:
        """Closes files or connections."""


def log_folder(section: Any) -> Path:
    """``<output_path>/<job_name>`` of a section, absolute: the program may change its working directory."""
    return (Path(section.output_path or ".") / section.job_name).absolute()


def require_package(package: str, section: str) -> None:
    """Refuses a monitor whose package is missing. Called on every rank, so that all decide alike.

    Raises:
        DeepSpeedConfigError: It cannot be imported.
    """
    if package not in sys.modules and find_spec(package) is None:
        raise DeepSpeedConfigError(
            f"{section}.enabled is true, but the package {package} is not installed; run `pip install {package}`, or "
            f"set {section}.enabled to false"
        )


def by_step(events: Sequence[Event]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields ``(step, {name: value})`` for each group of events with the same step."""
    at, values = None, {}
    for name, value, step in events:
        if at is not None and step != at:
            yield at, values
            values = {}
        at = step
        values[name] = value
    if at is not None:
        yield at, values
