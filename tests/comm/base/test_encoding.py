"""Values become bytes and come back, and bytes of a stranger run nothing."""

from __future__ import annotations

import enum
import json
import pickle
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from deepspeed.comm.base.encoding import decode, encode
from deepspeed.errors import CommunicationError


class Color(enum.Enum):
    RED = "r"


Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Record:
    name: str
    parts: tuple[Any, ...] = ()
    made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.name == "refused":
            raise AssertionError("a constructor was called")


@dataclass
class Output(OrderedDict):  # as transformers' outputs are
    logits: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


VALUES = [
    None, True, -3, 2**80, 0.1, float("inf"), "text \u00e9 \ud800", b"\0bytes", 1j, [1, [2]], (1, (2, "b")), {1, 2},
    frozenset({"a"}), {"a": 1, (1, 2): {"b": None}, Color.RED: ()}, OrderedDict(b=1, a=2), Counter("aab"), Color.RED,
    slice(1, None, 2), range(3, 9, 2), Path("/a/b"), torch.float8_e4m3fn, torch.device("cpu"), torch.Size((2, 3)),
    Pair(1, [2]), Record("a", (Pair(1, 2), torch.int8)), numpy.float32(1.5), numpy.int64(3),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_come_back(value):
    again = decode(encode(value))
    assert again == value and type(again) is type(value)


def test_nan_arrays_and_bytes_side_by_side():
    nan, array, data = decode(encode([float("nan"), numpy.arange(6, dtype=">i4").reshape(2, 3), bytearray(b"ab")]))
    assert nan != nan and data == b"ab"
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]] and array.flags.writeable


TENSORS = [
    torch.arange(6.0).view(2, 3).t(), torch.tensor(3, dtype=torch.int16), torch.empty(0, 4),
    torch.tensor([True, False]), torch.tensor([1.5], dtype=torch.bfloat16, requires_grad=True),
    torch.tensor([1 + 2j]).conj(),
    torch.ones(4, dtype=torch.float8_e5m2), torch.nn.Parameter(torch.ones(2)),
]  # fmt: skip


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda each: f"{each.dtype}{tuple(each.shape)}")
def test_tensors_come_back(tensor):
    again = decode(encode({"a": tensor, "b": b"x"}))["a"]
    assert (again.dtype, again.shape, again.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
    assert again.double().equal(tensor.detach().resolve_conj().double()) if not tensor.is_complex() else True
    if not again.requires_grad:
        again.zero_()  # its own memory


def test_complex_values():
    assert decode(encode(torch.tensor([1 + 2j]).conj())).tolist() == [1 - 2j]


def test_a_dataclass_is_filled_without_its_constructor():
    record = Record("refused-later")
    object.__setattr__(record, "name", "refused")
    assert decode(encode(record)) == record
    output = decode(encode(Output(logits=[1])))
    assert output.logits == [1] and list(output.items()) == [("logits", [1])]


def cyclic() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@dataclass
class Hidden:
    value: int


Hidden.__qualname__ = "elsewhere.<locals>.Hidden"


@pytest.mark.parametrize(
    "value",
    [object(), print, (i for i in ()), Hidden(1), cyclic(), torch.ones(2).to_sparse(), torch.empty(1, device="meta"),
     numpy.array([object()])],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_only_code_restores_is_refused_or_replaced(value):
    with pytest.raises(TypeError, match=r"cannot send a|contains itself"):
        encode([value])
    if not isinstance(value, list):
        assert decode(encode([value], lambda odd: {"was": type(odd).__name__})) == [{"was": type(value).__name__}]


def message(packed: Any, tail: bytes = b"") -> bytes:
    head = json.dumps(packed).encode()
    return len(head).to_bytes(8, "little") + head + tail


class Opener:
    def __reduce__(self) -> Any:
        return pytest.fail, ("code ran",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Opener()),
        b"",
        message({"record": ["os", "system", ["true"], None]}),
        message({"record": ["subprocess", "Popen", [["true"]], None]}),
        message({"record": ["not_imported_anywhere", "Record", [], None]}),
        message({"record": [__name__, "Record", ["too few"], None]}),
        message({"enum": [__name__, "Color", "__class__"]}),
        message({"tensor": ["float32", 1 << 40, False, [0, 4]]}, b"1234"),
        message({"tensor": ["save", 1, False, [0, 4]]}, b"1234"),
        message({"array": ["O", 1, True, [0, 8]]}, b"12345678"),
        message({"unknown": 1}),
        message({"two": 1, "kinds": 2}),
        message({"blob": 3}),
    ],
    ids=range(13),
)
def test_bytes_of_a_stranger(data):
    with pytest.raises(CommunicationError, match="a message of another rank: expected a value"):
        decode(data)
