"""Operations of a simulation that are like one before: the result is made from its shape, without working it out again.

On tensors without values the shape of a result, its strides, its dtype and the arithmetic behind it depend on nothing
but the same facts of the arguments. So each is worked out once, by torch, and a layer that is like the layer before it
costs only what its own code and the engine's cost. What is not provably so is run: views, results that share storage,
operations that are not torch's own, arguments with values or of a class of their own, and single numbers (which take
part in type promotion as numbers of Python, or not, and do not say which).

This is on the way of every operation, about 2,000 of them per layer, so it is written to be fast.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

from deepspeed.plan.memory import META, tensors_of
from deepspeed.zero.storage import storage_key

Count = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]
"""What an operation costs, from it, its arguments and its result."""


class _OperationKind(enum.Enum):
    NEW = enum.auto()  # makes new tensors
    IN_PLACE = enum.auto()  # writes its first argument, keeps its shape and returns it
    VIEW = enum.auto()  # shows an argument in another way
    OTHER = enum.auto()


_NEW, _IN_PLACE, _VIEW, _OTHER = _OperationKind  # members of an enumeration take longer to look up than all of the rest
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_DATA_DEPENDENT = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view})


Made = tuple[Any, Any, bool | None]
"""The result of an operation, what it costs (None: nothing), and whether it is tensors with storage of their own (None:
not known)."""


class KnownShapes:
    """What the operations of one simulation gave.

    Args:
        count: Works out what an operation costs; asked once for operations that are alike, and not for views.

    Attributes:
        is_used: False: every operation is worked out.
    """

    is_used = True

    def __init__(self, count: Count) -> None:
        self._count = count
        self._effects: dict[
            int, tuple[_OperationKind, Any]
        ] = {}  # by id: operations are hashed by a function of Python
        self._known: dict[Any, tuple[Any, Any]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made:
        """Runs one operation, or makes what it would give."""
        operation = id(func)
        if operation not in self._effects:
            self._effects[operation] = (_effect(func), func)
        effect = self._effects[operation][0]
        if effect is _VIEW:
            return func(*args, **kwargs), None, False
        facts = None
        if effect is not _OTHER and self.is_used:
            facts = _facts((*args, *kwargs.items()) if kwargs else args)
        if facts is None:
            result = func(*args, **kwargs)
            return result, self._count(func, args, kwargs, result), None
        key = (operation, torch.get_default_dtype(), facts)
        known = self._known.get(key)
        if known is not None:
            recipe, cost = known
            if effect is _IN_PLACE:
                return args[0], cost, False
            if recipe is not None:
                return _made(recipe), cost, True
        result = func(*args, **kwargs)
        if known is None:
            cost = self._count(func, args, kwargs, result)
            self._known[key] = (_recipe(result, args, kwargs) if effect is _NEW else None, cost)
        return result, cost, None


def _effect(func: Any) -> _OperationKind:
    schema = func._schema
    if not schema.name.startswith("aten::") or _DATA_DEPENDENT.intersection(func.tags) or not schema.returns:
        return _OTHER
    shared = [a for a in schema.arguments if a.alias_info is not None]
    if not shared and all(r.alias_info is None for r in schema.returns):
        return _NEW
    if shared == schema.arguments[:1] and shared[0].alias_info.is_write and schema.name.endswith("_"):
        return _IN_PLACE
    # What is made of other operations (reshape, contiguous) may give a copy under the schema of a view.
    is_composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    is_view = not is_composite and all(r.alias_info is not None for r in schema.returns)
    return _VIEW if is_view and not any(a.alias_info.is_write for a in shared) else _OTHER


def _facts(values: Any) -> tuple[Any, ...] | None:
    """Returns what a result depends on, for comparison; None if it also depends on something unknown."""
    found: list[Any] = [type(values)]
    for value in values:
        kind = type(value)
        if kind in _TENSORS:
            shape = value.shape
            if not shape or not _is_shape_only(value):
                return None
            found.append((value.dtype, shape, value.stride()))
        elif kind in _PLAIN:
            found.append((kind, value))
        elif kind is tuple or kind is list:
            inner = _facts(value)
            if inner is None:
                return None
            found.append(inner)
        else:
            return None
    return tuple(found)


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
    if type(kind) is torch.dtype:
        return torch.empty_strided(recipe[1], recipe[2], dtype=kind, device=META)
    if kind is None:
        return recipe[1]
    return kind([_made(item) for item in recipe[1:]])
