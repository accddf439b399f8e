"""Refuses pickles that allocate far more than their own size, before they are loaded.

Torch's restricted loader runs no code, but it calls the functions on its allow-list with any arguments:
``bytes(10**9)`` is a short pickle. This module follows the opcodes without executing them. Calls must be such as a
pickler writes: no number or ``range`` in the place of a container, and no type that picklers never call.
"""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, NoReturn

_BUILTINS = frozenset(
    f"builtins.{name}" for name in ("bytes", "bytearray", "set", "frozenset", "range", "slice", "complex")
)
_NUMPY_CORE = ("numpy._core.multiarray.", "numpy.core.multiarray.")
_REBUILD = "torch._utils._rebuild"
_LEGACY_PICKLES = 5  # in a torch file that is no archive: magic number, version, system, the object, storage keys
_OLD_NAMES = {"__builtin__.xrange": "builtins.range"}
_CONSTANTS = frozenset(
    {
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
    }
    | {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"}
    | {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
)
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


@dataclass(frozen=True)
class _Global:
    name: str


@dataclass(frozen=True)
class _PickledObject:
    """Stands for the object that a call or a container opcode makes; ``by`` names the callable or the type."""

    by: str


def check_file(file: IO[bytes]) -> None:
    """Checks a torch file. ``file``: open for reading, at its start; reset to the start afterwards.

    Raises:
        pickle.UnpicklingError: It would allocate more than its own size, or is no torch file.
    """
    try:
        for stream in _pickles(file):
            _follow(stream)
    except (ValueError, IndexError, KeyError, TypeError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise pickle.UnpicklingError(f"not a pickle that the restricted loader can read: {error!r}") from None
    finally:
        file.seek(0)


def _pickles(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yields the pickles in a torch file; each must be read up to its end before the next."""
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        file.seek(0)
        for _ in range(_LEGACY_PICKLES):
            yield file
            if not file.read(1):
                return
            file.seek(-1, 1)
        return
    size = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > size:
            raise pickle.UnpicklingError("its parts are larger than the file: they are compressed")
        for entry in entries:
            if entry.filename.rpartition("/")[2] == "data.pkl":
                with archive.open(entry) as stream:
                    yield stream


def _follow(stream: IO[bytes]) -> None:
    """Follows the opcodes of one pickle with stand-ins for values: constants, globals, containers, results of calls."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name in _CONSTANTS:
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}.get(name, argument))
        elif name == "GLOBAL":
            full = str(argument).replace(" ", ".", 1)
            full = _OLD_NAMES.get(full, full.replace("__builtin__.", "builtins.", 1))
            stack.append(_Global(full))
        elif name in _EMPTY:
            stack.append(_PickledObject(_EMPTY[name].__name__))
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]
        elif name == "TUPLE":
            stack.append(tuple(_pop_to_mark(stack)))
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("APPENDS", "SETITEMS", "ADDITEMS"):
            _pop_to_mark(stack)
        elif name in ("APPEND", "BUILD"):
            stack.pop()
        elif name == "SETITEM":
            del stack[-2:]
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, called = stack.pop(), stack.pop()
            stack.append(_PickledObject(_check_call(called, arguments)))
        elif name == "BINPERSID":
            stack[-1] = _PickledObject("storage")
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif name not in ("PROTO", "STOP"):
            raise pickle.UnpicklingError(f"opcode {name}")


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    place = len(stack) - 1 - stack[::-1].index(_MARK)
    popped = stack[place + 1 :]
    del stack[place:]
    return popped


def _check_call(called: Any, arguments: Any) -> str:
    """Returns the name of the called global; raises if the call may allocate more than the pickle's size."""
    if not isinstance(called, _Global) or not isinstance(arguments, tuple):
        raise pickle.UnpicklingError("a call of something that is not a global, or whose arguments are not a tuple")
    name = called.name
    if any(isinstance(argument, _PickledObject) and argument.by == "builtins.range" for argument in arguments):
        _refuse(name, "a range")
    if name.startswith("builtins."):
        if name not in _BUILTINS:
            _refuse(name, "arguments, though picklers never call it")
        if name in ("builtins.bytes", "builtins.bytearray") and arguments and not _is_text(arguments[0]):
            _refuse(name, "a number")
    elif name == "_codecs.encode":
        if len(arguments) != 2 or arguments[1] not in ("latin1", "latin-1"):
            _refuse(name, "another encoding than latin1")
    elif name.startswith(_NUMPY_CORE):
        if name.endswith("._reconstruct") and (len(arguments) != 3 or arguments[1] != (0,)):
            _refuse(name, "a shape")
        if name.endswith(".scalar") and len(arguments) != 2:
            _refuse(name, "no value")
    elif name.startswith("numpy.") and name != "numpy.dtype" and not name.startswith("numpy.dtypes."):
        _refuse(name, "arguments, though picklers never call it")
    elif name == "torch._tensor._rebuild_from_type_v2":
        inner = arguments[0] if arguments else None  # called with the third argument
        if not isinstance(inner, _Global) or not inner.name.startswith(_REBUILD):
            raise pickle.UnpicklingError("a tensor that no function of torch rebuilds")
    elif name.startswith(("torch.storage.", "torch.Tensor")) or (name.startswith("torch.") and name.endswith("Tensor")):
        _refuse(name, "arguments, though picklers never call it")
    return name


def _is_text(argument: Any) -> bool:
    return isinstance(argument, str | bytes) or (
        isinstance(argument, _PickledObject) and argument.by == "_codecs.encode"
    )


def _refuse(name: str, given: str) -> NoReturn:
    raise pickle.UnpicklingError(f"{name} called with {given}")
