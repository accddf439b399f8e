"""The value types of configuration keys and the coercions that are the same in every section.

A whole float is an integer (``5e8``), numeric text is a number (``"500"``, ``"5e8"``), and a switch may be written
true/false, 1/0, yes/no, on/off, t/f or y/n in any case. A bool is never a number. Values of ``torch.dtype`` are taken
by name, so that this package needs no torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

_INTEGER_TEXT = re.compile(r"[+-]?\d+")
_NUMBER_TEXT = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_TRUE = frozenset({"true", "yes", "on", "t", "y", "1"})
_FALSE = frozenset({"false", "no", "off", "f", "n", "0"})
_DTYPES = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}


def _plain(value: Any) -> Any:
    """Returns a scalar of numpy, or a tensor without dimensions, as a value of Python; other values as they are."""
    return value.item() if getattr(value, "shape", None) == () else value


def to_int(value: Any) -> int:
    """Returns an int, a whole float, or the text of one as int. Raises ValueError: anything else, bools included."""
    value = _plain(value)
    if isinstance(value, bool):
        raise ValueError("a bool is not an integer")
    if isinstance(value, int):
        return value
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    if isinstance(value, str) and _INTEGER_TEXT.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, str) and _NUMBER_TEXT.fullmatch(value.strip()):  # YAML reads 5e8 as text
        return to_int(float(value))
    raise ValueError("not an integer")


def to_float(value: Any) -> float:
    """Returns a number or its text as float, infinity too. Raises ValueError: anything else, NaN and bools too."""
    value = _plain(value)
    if isinstance(value, bool):
        raise ValueError("a bool is not a number")
    is_text = isinstance(value, str) and _NUMBER_TEXT.fullmatch(value.strip()) is not None
    if is_text or isinstance(value, (int, float)):
        try:
            number = float(value)
        except OverflowError:
            raise ValueError("larger than any float") from None
        if not math.isnan(number):
            return number
    raise ValueError("not a number")


def to_bool(value: Any) -> bool:
    """Returns a bool, 0 or 1, or one of the words for yes and no. Raises ValueError: anything else."""
    value = _plain(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    raise ValueError("not a bool")


def to_dtype(value: Any) -> str:
    """Returns a dtype's short name (fp32, fp16, bf16) from any of its spellings or from a ``torch.dtype``.

    Raises:
        ValueError: Not one of the three floating types.
    """
    is_torch = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    if isinstance(value, str) or is_torch:
        name = _DTYPES.get(str(value).strip().lower().removeprefix("torch."))
        if name is not None:
            return name
    raise ValueError("not a floating dtype")


def _to_path(value: Any) -> Any:
    """Returns text or a path object as text; accelerate writes the word none (or nothing) for no path."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return None if isinstance(value, str) and value.strip().lower() in ("", "none") else value


def _to_stage(value: Any) -> Any:
    """Returns a ZeRO stage; older files write it also as text, as a whole float or as ``true`` (stage 1)."""
    value = _plain(value)
    return int(value) if isinstance(value, bool) else to_int(value)


def _to_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value, tuple) else value


def _tuple_to_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _number_or_list(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [to_float(item) for item in value]
    return to_float(value)


def _or_auto(convert: Callable[[Any], Any]) -> BeforeValidator:
    """Returns a validator that accepts the text ``auto`` in any case, and converts everything else."""

    def coerce(value: Any) -> Any:
        return "auto" if isinstance(value, str) and value.strip().lower() == "auto" else convert(value)

    return BeforeValidator(coerce)


def _to_steps(value: Any) -> Any:
    """Returns a step count where infinite means never; accelerate always sends an infinite ``steps_per_print``."""
    value = _plain(value)
    return None if isinstance(value, float) and value == math.inf else to_int(value)


Int = Annotated[int, BeforeValidator(to_int)]
Float = Annotated[float, BeforeValidator(to_float)]
Bool = Annotated[bool, BeforeValidator(to_bool)]
DType = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(to_dtype)]
FilePath = Annotated[str | None, BeforeValidator(_to_path)]
Steps = Annotated[int | None, BeforeValidator(lambda value: None if value is None else _to_steps(value))]
Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_to_stage)]
Degree = Annotated[Int, BeforeValidator(lambda value: 1 if value is None else value)]
"""A number of ranks that is 1 if it is null."""
IntList = Annotated[list[Int], BeforeValidator(_tuple_to_list)]
FloatList = Annotated[list[Float], BeforeValidator(_tuple_to_list)]
TextList = Annotated[list[str], BeforeValidator(_to_list)]
TextsOrAuto = Annotated[list[str] | Literal["auto"], _or_auto(_to_list)]
PerGroup = Annotated[float | list[float], BeforeValidator(_number_or_list)]
BoolOrAuto = Annotated[bool | Literal["auto"], _or_auto(to_bool)]
IntOrAuto = Annotated[int | Literal["auto"], _or_auto(to_int)]
FloatOrAuto = Annotated[float | Literal["auto"], _or_auto(to_float)]
AnyCase = BeforeValidator(lambda value: value.strip().lower() if isinstance(value, str) else value)
Capitalized = BeforeValidator(lambda value: value.strip().capitalize() if isinstance(value, str) else value)
