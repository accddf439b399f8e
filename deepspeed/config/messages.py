"""Collects problems and notices while a configuration is read."""

from __future__ import annotations

import json
from typing import Any

from deepspeed.errors import DeepSpeedConfigError

Path = tuple[str | int, ...]


def dotted(path: Path) -> str:
    """Returns ``("a", "b", 0, "c")`` as ``a.b[0].c``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def shown(value: Any) -> str:
    """Returns a value as the configuration would write it, cut to a readable length."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class ConfigMessages:
    """Collects problems and notices while a configuration is read."""

    def __init__(self, lines: dict[Path, int], order: dict[Path, int], source: str | None) -> None:
        self.notices: list[str] = []  # one line each, in the order found
        self.warnings: list[str] = []  # those of them for requests that have no effect
        self.failed: set[Path] = set()  # paths whose value was refused; rules that depend on one of them stay silent
        # for a path that the caller wrote differently (old name, alias), the path as written
        self.spelled: dict[Path, Path] = {}
        self._lines = lines
        self._order = order
        self._source = source
        self._problems: list[tuple[int, str]] = []

    def written(self, path: Path) -> Path:
        """Returns the path as the caller wrote it."""
        for length in range(len(path), 0, -1):
            original = self.spelled.get(path[:length])
            if original is not None:
                return original + path[length:]
        return path

    def label(self, path: Path) -> str:
        """Returns the full dotted name as written, with its line where there is a file."""
        original = self.written(path)
        line = self._lines.get(original)
        return dotted(original) + (f" (line {line})" if line is not None else "")

    def problem(self, path: Path, text: str, *depends: Path) -> None:
        """Records a problem with a key.

        Args:
            text: What was expected, what was found, what to change.
            *depends: Further keys the problem depends on; if one of them (or ``path``) was already refused, the problem
                would only follow from that and is dropped.
        """
        if any(any(each[: len(bad)] == bad for bad in self.failed) for each in (path, *depends)):
            return
        self.add(path, f"{self.label(path)}: {text}" if path else text)

    def fail(self, path: Path, text: str) -> None:
        """Records a problem and marks the key as refused."""
        self.problem(path, text)
        self.failed.add(path)

    def add(self, path: Path, sentence: str) -> None:
        """Records a finished sentence at the place of ``path``, once."""
        entry = (self._place(self.written(path)), sentence)
        if entry not in self._problems:
            self._problems.append(entry)

    def notice(self, line: str) -> None:
        """Records a line to be logged once."""
        if line not in self.notices:
            self.notices.append(line)

    def warning(self, line: str) -> None:
        """Records a line to be logged once, as a warning."""
        self.notice(line)
        if line not in self.warnings:
            self.warnings.append(line)

    def problems(self) -> tuple[str, ...]:
        """Returns all problems in the order of the configuration."""
        return tuple(sentence for _, sentence in sorted(self._problems, key=lambda entry: entry[0]))

    def raise_if_any(self) -> None:
        """Raises all problems, if there are any, as one DeepSpeedConfigError."""
        problems = self.problems()
        if problems:
            raise configuration_error(problems, self._source)

    def _place(self, path: Path) -> int:
        for length in range(len(path), 0, -1):
            place = self._order.get(path[:length])
            if place is not None:
                return place
        return len(self._order)


def configuration_error(problems: tuple[str, ...], source: str | None) -> DeepSpeedConfigError:
    """Returns the error that lists ``problems``."""
    where = f"the configuration {source}" if source else "the configuration"
    if len(problems) == 1:
        return DeepSpeedConfigError(f"{where} cannot be used: {problems[0]}", problems)
    listing = "\n".join(f"  {number}. {text}" for number, text in enumerate(problems, 1))
    return DeepSpeedConfigError(f"{where} cannot be used; {len(problems)} problems:\n{listing}", problems)
