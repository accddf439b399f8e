"""Operations of a rehearsal that are like one before: the result is made from its shape, without working it out again.

On tensors without values the shape of a result, its strides, its dtype and the arithmetic behind it depend on nothing
but the same facts of the arguments. So each is worked out once, by torch, and a layer that is like the layer before it
costs only what its own code and the engine's cost. What is not provably so is run: views, results that share storage,
operations that are not torch's own, arguments with values or of a class of their own, and single numbers (which take
part in type promotion as numbers of Python, or not, and do not say which).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from deepspeed.plan.memory import tensors_of
from deepspeed.zero.storage import storage_key

Count = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]
"""Floating-point operations of an operation, its arguments and its result."""


class _Effect(enum.Enum):
    NEW = enum.auto()  # makes new tensors
    IN_PLACE = enum.auto()  # writes its first argument, keeps its shape and returns it
    OTHER = enum.auto()


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_DATA_DEPENDENT = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view})


class Made(NamedTuple):
    """What an operation gave.

    Attributes:
        result: Its result.
        flops: Its floating-point operations.
        is_new: The result is known to share no storage with an argument.
    """

    result: Any
    flops: int
    is_new: bool = False


class KnownShapes:
    """What the operations of one rehearsal gave.

    Args:
        count: Counts arithmetic; asked once for operations that are alike.

    Attributes:
        is_used: False: every operation is worked out.
    """

    is_used = True

    def __init__(self, count: Count) -> None:
        self._count = count
        self._known: dict[Any, tuple[Any, int]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made:
        """Runs one operation, or makes what it would give."""
        effect = _effect(func)
        facts = None
        if effect is not _Effect.OTHER and self.is_used:
            facts = _facts((args, tuple(kwargs.items())) if kwargs else args)
        if facts is None:
            result = func(*args, **kwargs)
            return Made(result, self._count(func, args, kwargs, result))
        key = (func, torch.get_default_dtype(), facts)
        known = self._known.get(key)
        if known is not None:
            recipe, flops = known
            return Made(args[0], flops) if effect is _Effect.IN_PLACE else Made(_made(recipe), flops, True)
        result = func(*args, **kwargs)
        flops = self._count(func, args, kwargs, result)
        recipe = _recipe(result, args, kwargs) if effect is _Effect.NEW else _Effect.IN_PLACE
        if recipe is not None:
            self._known[key] = (recipe, flops)
        return Made(result, flops)


@functools.cache
def _effect(func: Any) -> _Effect:
    schema = func._schema
    if not schema.name.startswith("aten::") or _DATA_DEPENDENT.intersection(func.tags) or not schema.returns:
        return _Effect.OTHER
    shared = [a for a in schema.arguments if a.alias_info is not None]
    if not shared and all(r.alias_info is None for r in schema.returns):
        return _Effect.NEW
    if shared == schema.arguments[:1] and shared[0].alias_info.is_write and schema.name.endswith("_"):
        return _Effect.IN_PLACE
    return _Effect.OTHER


def _facts(value: Any) -> Any:
    """What a result depends on, to be compared; None if there is more to it than can be told from outside."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return (value.dtype, value.shape, value.stride()) if value.dim() and _is_shape_only(value) else None
    if kind is tuple or kind is list:
        found = []
        for item in value:
            facts = _facts(item)
            if facts is None:
                return None
            found.append(facts)
        return (kind, *found)
    return (kind, value) if kind in _PLAIN else None


def _is_shape_only(tensor: torch.Tensor) -> bool:
    return tensor.is_meta and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def _recipe(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """How to make a result again; None if it is anything but numbers and new tensors with storage of their own.

    Returns:
        (dtype, shape, strides) of a tensor; (tuple or list, a recipe for each item); (None, a number).
    """
    taken = {storage_key(tensor) for tensor in tensors_of((args, kwargs))}

    def of(value: Any) -> tuple[Any, ...] | None:
        if type(value) in (tuple, list):
            items = [of(item) for item in value]
            return None if None in items else (type(value), *items)
        if type(value) in _PLAIN:
            return (None, value)
        if type(value) is not torch.Tensor or not _is_shape_only(value) or storage_key(value) in taken:
            return None
        taken.add(storage_key(value))
        recipe = (value.dtype, value.shape, value.stride())
        is_whole = value.untyped_storage().nbytes() == _made(recipe).untyped_storage().nbytes()
        return recipe if is_whole and not value.storage_offset() else None

    return of(result)


def _made(recipe: tuple[Any, ...]) -> Any:
    kind = recipe[0]
    if kind is None:
        return recipe[1]
    if kind is tuple or kind is list:
        return kind([_made(item) for item in recipe[1:]])
    return torch.empty_strided(recipe[1], recipe[2], dtype=kind, device="meta")
