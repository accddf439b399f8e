"""Reads a configuration: a dict, a file in Hjson, or URL-safe base64 of JSON."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from hjson import HjsonDecodeError, HjsonDecoder
from hjson.decoder import JSONObject

from deepspeed.config.messages import Path, configuration_error, dotted


@dataclass
class Document:
    """A configuration as read, before validation."""

    data: dict[str, Any]  # the caller's dict, or what was read
    lines: dict[Path, int] = field(default_factory=dict)  # line of each key, for files
    name: str | None = None  # file name, if there is one
    problems: list[str] = field(default_factory=list)  # duplicate keys
    notices: list[str] = field(default_factory=list)  # lines about oddities that were accepted


# The key of the value that begins at the end of a text.
_KEY_BEFORE = re.compile(r"""["']?([\w.-]+)["']?\s*:\s*$""")


class _Object:
    """A parsed object with its pairs and the positions where their values begin."""

    def __init__(self, pairs: list[tuple[str, Any]], starts: list[int]) -> None:
        self.pairs = pairs
        self.starts = starts


class _PositionDecoder(HjsonDecoder):  # type: ignore[misc]
    """Hjson's decoder, with objects as :class:`_Object`.

    The package hands every object to ``parse_object`` together with the function that reads one value; wrapping that
    function gives the position of each value, without a parser of our own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unclosed: list[int] = []  # after an error, the beginnings of the objects that were open, outermost first
        self.parse_object = self._parse_object
        from hjson.decoder import make_scanner

        self.scan_once, self.scan_object_once = make_scanner(self)

    def _parse_object(
        self, state: Any, encoding: Any, strict: Any, scan: Any, _hook: Any, _pairs: Any, memo: Any, bare: bool = False
    ) -> Any:
        starts: list[int] = []

        def scan_value(text: str, begin: int) -> Any:
            starts.append(begin)
            return scan(text, begin)

        self.unclosed.append(state[1])
        made = JSONObject(state, encoding, strict, scan_value, None, lambda pairs: _Object(pairs, starts), memo, bare)
        self.unclosed.pop()
        return made


def _plain(value: Any, path: Path, text: str, document: Document, with_lines: bool) -> Any:
    if isinstance(value, list):
        return [_plain(item, (*path, i), text, document, with_lines) for i, item in enumerate(value)]
    if not isinstance(value, _Object):
        return value
    plain: dict[str, Any] = {}
    for (name, item), start in zip(value.pairs, value.starts, strict=True):
        here = (*path, name)
        colon = text.rfind(":", 0, start)  # on the line of the key
        line = text.count("\n", 0, colon if colon >= 0 else start) + 1
        if name in plain:
            first = document.lines.get(here)
            where = f" (lines {first} and {line})" if with_lines and first is not None else ""
            document.problems.append(f"{dotted(here)}{where}: the key occurs twice; keep one of them")
        elif with_lines:
            document.lines[here] = line
        plain[name] = _plain(item, here, text, document, with_lines)
    return plain


def _syntax_problem(text: str, error: HjsonDecodeError, unclosed: list[int]) -> str:
    """Returns what the decoder could not read, where, and what to change."""
    braces = [start - 1 for start in unclosed if text[start - 1 : start] == "{"]
    if braces and not text[error.pos :].strip():
        begin = braces[-1]
        line, key = text.count("\n", 0, begin) + 1, _KEY_BEFORE.search(text[:begin])
        what = f"the object {key[1]} that begins there" if key else "the object that begins there"
        return (
            f"line {line}: {what} has no closing brace when the text ends; a brace on the same line behind a text "
            "without quotation marks is part of that text"
        )
    # The decoder's messages have a %r for the offending character.
    message = error.msg.replace("%r", repr(text[error.pos : error.pos + 1]))
    found = text[error.pos :].split("\n", 1)[0].strip()[:40]
    what = f"found {found!r}" if found else "the text ends there"
    return f"line {error.lineno}, column {error.colno}: {message[:1].lower()}{message[1:]}; {what}"


def _read_text(text: str, name: str | None) -> Document:
    document = Document({}, name=name)
    decoder = _PositionDecoder()
    try:
        value = decoder.decode(text)
    except HjsonDecodeError as error:
        raise configuration_error((_syntax_problem(text, error, decoder.unclosed),), name) from None
    except (IndexError, RecursionError) as error:
        # The decoder runs off the end of the text on an unfinished comment or multi-line text.
        raise configuration_error((f"the text ends in the middle of a value or comment ({error})",), name) from None
    plain = _plain(value, (), text, document, with_lines=name is not None)
    if not isinstance(plain, dict):
        kind = type(plain).__name__
        raise configuration_error((f"expected an object with keys, found {kind}",), name)
    document.data = plain
    return document


def _read_base64(text: str) -> Document:
    compact = "".join(text.split())  # the command base64 breaks its output into lines
    try:
        decoded = base64.b64decode(compact.encode("ascii") + b"=" * (-len(compact) % 4), altchars=b"-_", validate=True)
        content = decoded.decode("utf-8")
        json.loads(content)
    except (binascii.Error, ValueError, UnicodeError):
        hint = " JSON text itself is not taken: use json.loads on it." if text.lstrip()[:1] in ("{", "[") else ""
        found = text if len(text) <= 120 else text[:117] + "..."
        raise configuration_error(
            (
                f"there is no file {found!r}, and it is no URL-safe base64 of JSON; expected a dict, the path of "
                f"an existing file, or such base64.{hint}",
            ),
            None,
        ) from None
    return _read_text(content, None)


def read_source(source: Any) -> Document:
    """Reads a configuration in any of its forms.

    Args:
        source: A mapping, a path (``str`` or path object) to an Hjson file, or URL-safe base64 of JSON.

    Raises:
        DeepSpeedConfigError: Nothing of the kind, or text that cannot be parsed. Duplicate keys are left in
            ``problems`` to be reported with the rest.
    """
    if isinstance(source, dict):
        return Document(source)
    if isinstance(source, Mapping):
        return Document(dict(source))
    if isinstance(source, os.PathLike):
        path = FilePath(source)
        if not is_readable(source):
            raise configuration_error((_not_a_file(path),), None)
        return _read_file(path)
    if isinstance(source, str):
        if is_readable(source):
            return _read_file(FilePath(source))
        if _is(FilePath.is_dir, source):
            raise configuration_error((_not_a_file(FilePath(source)),), None)
        return _read_base64(source)
    raise configuration_error(
        (
            "expected a dict, the path of a file, or URL-safe base64 of JSON; "
            f"found {type(source).__name__ if source is not None else 'nothing'}",
        ),
        None,
    )


def is_readable(path: str | os.PathLike[str]) -> bool:
    """Returns whether there is something other than a folder: a file, or a pipe such as ``<(command)`` of a shell."""
    return _is(lambda found: found.exists() and not found.is_dir(), path)


def _is(test: Callable[[FilePath], bool], text: str | os.PathLike[str]) -> bool:
    try:
        return test(FilePath(text))
    except (OSError, ValueError):  # too long for a file name, or a null byte in it
        return False


def _not_a_file(path: FilePath) -> str:
    return f"{path} is a folder; give the path of a file in it" if path.is_dir() else f"there is no file {path}"


def _read_file(path: FilePath) -> Document:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise configuration_error((f"the file is not UTF-8 text ({error})",), str(path)) from None
    except OSError as error:
        raise configuration_error((f"the file cannot be read ({error.strerror}); correct it",), str(path)) from None
    document = _read_text(text, str(path))
    if path.suffix.lower() == ".json":
        try:
            json.loads(text)
        except ValueError as error:
            document.notices.append(
                f"{path} is not JSON ({error}) and was read as Hjson, which needs no commas or quotation marks: check "
                "that it was read as you mean it, or name it .hjson"
            )
    return document


def load_ds_config(config: Any) -> dict[str, Any]:
    """Returns a configuration as a dict (a dict as it is); only its syntax is checked.

    Raises:
        DeepSpeedConfigError: The source cannot be read, or holds a key twice.
    """
    document = read_source(config)
    if document.problems:
        raise configuration_error(tuple(document.problems), document.name)
    return document.data
