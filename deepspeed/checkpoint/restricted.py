"""Torch files that run no code when read: splits off objects that need code, and reads the rest safely.

Files are loaded by ``torch.load(weights_only=True)`` with the allow-list below: plain containers, numbers, tensors,
numpy arrays, paths, times and namespaces. Before that, the calls in a file are checked
(:mod:`deepspeed.checkpoint.bounded_pickle`). Other objects in a client state are saved in a separate file, which is
only opened on request, because opening it may run code.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import pathlib
import pickle
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from deepspeed.checkpoint.bounded_pickle import check_file
from deepspeed.errors import CheckpointError

Path = tuple[Any, ...]
"""Keys from the top of a nested dict down to an entry."""

_SMALL_BYTES = 1 << 16


def _allowed() -> list[Any]:
    """Returns the types and functions that the restricted loader may use beyond torch's own.

    A pair gives the name in files too.
    """
    builtins: list[Any] = [int, float, bool, str, bytes, complex, list, tuple, dict, set, frozenset, slice, range]
    found: list[Any] = [*((kind, f"builtins.{kind.__name__}") for kind in builtins)]
    found += [collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque]
    found += [datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone]
    found += [argparse.Namespace]
    # Python 3.13 moved the classes to pathlib._local; files of either version must open in both.
    for flavour in ("PurePosixPath", "PureWindowsPath", "PosixPath", "WindowsPath"):
        kind = getattr(pathlib, flavour)
        if flavour == "WindowsPath" and not isinstance(pathlib.Path(), kind):
            kind = pathlib.PureWindowsPath
        if flavour == "PosixPath" and not isinstance(pathlib.Path(), kind):
            kind = pathlib.PurePosixPath
        found += [(kind, f"pathlib.{flavour}"), (kind, f"pathlib._local.{flavour}")]
    array_functions = {
        "_reconstruct": numpy.empty(0).__reduce__()[0],
        "scalar": numpy.float64(0).__reduce__()[0],  # type: ignore[attr-defined]
    }
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        found += [(function, f"{module}.{name}") for name, function in array_functions.items()]
    found += [numpy.ndarray, numpy.dtype]
    found += [kind for name in dir(numpy.dtypes) if isinstance(kind := getattr(numpy.dtypes, name), type)]
    found += [kind for kind in set(numpy.sctypeDict.values()) if kind is not numpy.object_]
    return found


@contextmanager
def allow_list(further: list[Any] | None = None) -> Iterator[None]:
    """Extends the restricted loader by our allow-list, and ``further``, inside the block."""
    with torch.serialization.safe_globals([*_allowed(), *(further or [])]):
        yield


def reduce_container(value: Any) -> Any:
    """Reduces containers that the restricted loader will not fill entry by entry to one call of their class."""
    if type(value) is collections.defaultdict:
        return collections.defaultdict, (value.default_factory, dict(value))
    if type(value) is collections.deque:
        return collections.deque, (list(value), value.maxlen)
    return NotImplemented


class _Pickler(pickle.Pickler):
    """Writes files for the restricted loader."""

    def reducer_override(self, value: Any) -> Any:
        return reduce_container(value)


_pickle_module = types.ModuleType("deepspeed_checkpoint_pickle")
_pickle_module.Pickler = _Pickler  # type: ignore[attr-defined]


def dumps(value: Any) -> bytes:
    """Returns a torch file."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_pickle_module)
    return buffer.getvalue()


def loads(data: bytes, what: str) -> Any:
    """Reads a torch file without running code. Raises CheckpointError: it is none, or needs code."""
    try:
        check_file(io.BytesIO(data))
        with allow_list():
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{what}: refused by the restricted loader ({reason(error)}). The file is damaged, or holds objects that "
            "only code could restore; take it only from where you trust it, and convert it there"
        ) from None


def loads_trusting(data: bytes) -> Any:
    """Reads a torch file that may run code. Only for files that the caller vouches for."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


@dataclass(frozen=True)
class PickledObject:
    """An object that only code can restore, as the file that would restore it. Loading this one restores that one."""

    kind: str  # name of its class
    data: bytes  # a torch file

    @classmethod
    def of(cls, value: Any) -> PickledObject:
        """Returns ``value`` pickled. Raises CheckpointError: it cannot be pickled."""
        kind = type(value).__name__
        try:
            return cls(kind, dumps(value))
        except Exception as error:  # whatever the object's own pickling raises
            raise CheckpointError(
                f"a {kind} object cannot be pickled ({error}); leave it out, or put its numbers, texts and tensors "
                "there instead"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return loads_trusting, (self.data,)

    def __deepcopy__(self, memo: Any) -> PickledObject:
        return self  # by __reduce__ a copy would open it


def split(value: dict[str, Any]) -> tuple[dict[str, Any], dict[Path, Any]]:
    """Splits off the entries of a nested dict that the restricted loader would refuse.

    Returns:
        A dict without the refused entries, and the refused entries by path. Dicts are searched recursively; other
        containers are kept or split off as a whole.
    """
    if _is_accepted(value):
        return value, {}
    kept: dict[str, Any] = {}
    refused: dict[Path, Any] = {}
    for key, entry in value.items():
        if not _is_accepted(key):
            refused[(key,)] = entry
        elif type(entry) is dict:
            kept[key], below = split(entry)
            refused.update({(key, *path): part for path, part in below.items()})
        elif _is_accepted(entry):
            kept[key] = entry
        else:
            refused[(key,)] = entry
    return kept, refused


def merge(value: dict[str, Any], refused: dict[Path, Any]) -> None:
    """Restores, in place, the entries that :func:`split` removed."""
    for path, entry in refused.items():
        target = value
        for key in path[:-1]:
            target = target.setdefault(key, {})
        target[path[-1]] = entry


def describe(path: Path) -> str:
    """Returns a path as it would be written in code."""
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])


def _is_accepted(value: Any) -> bool:
    """Returns whether the restricted loader gives ``value`` back: tried out, with large tensors left aside."""
    try:
        data = dumps(_without_bulk(value))
        check_file(io.BytesIO(data))
        with allow_list():
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # any error of an object's own pickling means that it cannot be loaded safely
        return False
    return True


def _without_bulk(value: Any) -> Any:
    """Returns the same structure with large plain tensors replaced by small ones."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value if value.untyped_storage().nbytes() <= _SMALL_BYTES else torch.empty(0, dtype=value.dtype)
    if type(value) is dict:
        return {key: _without_bulk(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_bulk(entry) for entry in value)
    return value


def reason(error: BaseException) -> str:
    """Returns the essential part of torch's long message."""
    text = str(error)
    marker = "WeightsUnpickler error:"
    text = text[text.index(marker) + len(marker) :] if marker in text else text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
