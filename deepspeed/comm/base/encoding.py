"""Turns values into bytes and back, for messages between ranks. Reading them runs no code, unlike a pickle.

The bytes are compressed JSON with the structure, and behind it what JSON does not hold: tensors, arrays, bytes. A
dataclass, named tuple or enum is filled with data if the reading process has its class already: nothing is imported,
and no constructor is called.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import json
import pathlib
import sys
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import torch

from deepspeed.errors import CommunicationError

_AS_JSON = (type(None), bool, int, float, str)
_SEQUENCES = {kind.__name__: kind for kind in (tuple, set, frozenset, torch.Size)}
_MAPPINGS: dict[str, type] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}


def encode(value: Any, replace: Callable[[Any], Any] | None = None) -> bytes:
    """Returns the bytes of a value.

    Args:
        value: Any nesting of containers, numbers, texts, bytes, paths, tensors of any shape and device, numpy arrays,
            dtypes, enums, named tuples and dataclasses (only their fields are sent).
        replace: Called with each object that has no encoding; returns what takes its place. None: raises.

    Raises:
        TypeError: An object has no encoding.
    """
    writer = _ValueWriter(replace)
    try:
        # The structure of a large model names its classes and tensors many times: a tenth is left of it.
        head = zlib.compress(json.dumps(writer.packed(value)).encode(), 1)
    except RecursionError:
        raise TypeError("a value that contains itself, or is nested too deeply") from None
    return b"".join([len(head).to_bytes(8, "little"), head, *writer.blobs])


def decode(data: bytes) -> Any:
    """Returns the value of :func:`encode`'s bytes. Tensors are in host memory.

    Raises:
        CommunicationError: The bytes are damaged, or name a class that this process has not imported.
    """
    try:
        end = 8 + int.from_bytes(data[:8], "little")
        return _ValueReader(data, end).value(json.loads(zlib.decompress(data[8:end])))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, zlib.error) as error:
        raise CommunicationError(
            f"a message of another rank: expected a value encoded by this release, found something else ({error}). "
            "Run the same release on all ranks, and import there the classes whose objects are sent"
        ) from error


class _ValueWriter:
    def __init__(self, replace: Callable[[Any], Any] | None) -> None:
        self.blobs: list[bytes] = []
        self._size = 0
        self._replace = replace

    def _place(self, blob: bytes) -> list[int]:
        self.blobs.append(blob)
        self._size += len(blob)
        return [self._size - len(blob), self._size]

    def _all(self, values: Any) -> list[Any]:
        return [value if type(value) in _AS_JSON else self.packed(value) for value in values]

    def packed(self, value: Any) -> Any:
        """Returns what JSON holds of ``value``: a list as it is, everything else that JSON lacks as ``{kind: ...}``."""
        kind = type(value)
        if kind in _AS_JSON:
            return value
        if kind is list:
            return self._all(value)
        if kind in _SEQUENCES.values():
            return {kind.__name__: self._all(value)}
        if kind in _MAPPINGS.values():
            return {kind.__name__: [self._all(value), self._all(value.values())]}
        if kind in (bytes, bytearray):
            return {"bytes": self._place(bytes(value))}
        if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta:
            return {"tensor": [_name_of(value.dtype), *value.shape, value.requires_grad, self._place(_bytes_of(value))]}
        if isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biufcmMSU":
            is_array = isinstance(value, numpy.ndarray)
            return {"array": [value.dtype.str, *value.shape, is_array, self._place(value.tobytes())]}
        if kind is torch.dtype:
            return {"dtype": _name_of(value)}
        if kind is torch.device:
            return {"device": str(value)}
        if isinstance(value, pathlib.PurePath):
            return {"path": str(value)}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind in (slice, range):
            return {kind.__name__: self._all((value.start, value.stop, value.step))}
        path = kind.__module__, kind.__qualname__
        if _class_of(*path) is kind:
            if isinstance(value, enum.Enum):
                return {"enum": [*path, value.name]}
            items = [self._all(value), self._all(value.values())] if isinstance(value, dict) else None
            return {"record": [*path, self._all(_fields_of(value)), items]}
        if self._replace is None:
            raise TypeError(f"cannot send a {kind.__qualname__!r} object")
        return self.packed(self._replace(value))


class _ValueReader:
    def __init__(self, data: bytes, start: int) -> None:
        self._data = memoryview(data)[start:]

    def value(self, packed: Any) -> Any:
        """Returns the value of what :meth:`_ValueWriter.packed` returned."""
        if isinstance(packed, list):
            return [self.value(each) for each in packed]
        if not isinstance(packed, dict):
            return packed
        ((kind, content),) = packed.items()
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](map(self.value, content))
        if kind in _MAPPINGS:
            keys, values = content
            return _MAPPINGS[kind](dict(zip(map(self.value, keys), map(self.value, values), strict=True)))
        read: Callable[[Any], Any] = getattr(self, f"_{kind}")
        return read(content)

    def _blob(self, interval: list[int]) -> bytearray:
        return bytearray(self._data[interval[0] : interval[1]])

    def _bytes(self, interval: list[int]) -> bytes:
        return bytes(self._blob(interval))

    def _tensor(self, content: list[Any]) -> torch.Tensor:
        dtype, *shape, requires_grad, interval = content
        data = self._blob(interval)
        flat = torch.frombuffer(data, dtype=self._dtype(dtype)) if data else torch.empty(0, dtype=self._dtype(dtype))
        return flat.view(shape).requires_grad_(requires_grad)

    def _array(self, content: list[Any]) -> Any:
        dtype, *shape, is_array, interval = content
        array = numpy.frombuffer(self._blob(interval), dtype=numpy.dtype(dtype)).reshape(shape)
        return array if is_array else array[()]

    def _dtype(self, name: str) -> torch.dtype:
        dtype = vars(torch)[name]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name} is no dtype")
        return dtype

    def _device(self, name: str) -> torch.device:
        return torch.device(name)

    def _path(self, text: str) -> pathlib.Path:
        return pathlib.Path(text)

    def _complex(self, parts: list[float]) -> complex:
        return complex(*parts)

    def _slice(self, bounds: list[Any]) -> slice:
        return slice(*map(self.value, bounds))

    def _range(self, bounds: list[int]) -> range:
        return range(*bounds)

    def _class(self, module: str, name: str) -> Any:
        if (found := _class_of(module, name)) is None:
            raise TypeError(f"{module} has no dataclass, named tuple or enum {name}")
        return found

    def _enum(self, content: list[str]) -> Any:
        module, name, member = content
        return self._class(module, name).__members__[member]

    def _record(self, content: list[Any]) -> Any:
        module, name, fields, items = content
        kind = self._class(module, name)
        values = [self.value(field) for field in fields]
        if issubclass(kind, tuple):
            return tuple.__new__(kind, values)
        made: Any = OrderedDict.__new__(kind) if issubclass(kind, OrderedDict) else object.__new__(kind)
        for field, value in zip(dataclasses.fields(kind), values, strict=True):
            object.__setattr__(made, field.name, value)
        for key, value in zip(*map(self.value, items or ([], [])), strict=True):
            OrderedDict.__setitem__(made, key, value)
        return made


def _class_of(module: str, name: str) -> Any:
    """Returns a dataclass, named tuple or enum of an imported module, without any ``__getattr__`` on the way."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    is_known = isinstance(found, type) and (_is_record(found) or issubclass(found, enum.Enum))
    return found if is_known else None


def _is_record(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _fields_of(record: Any) -> Any:
    if isinstance(record, tuple):
        return record
    return [getattr(record, field.name) for field in dataclasses.fields(record)]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""
