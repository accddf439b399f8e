"""A tensor without memory that stands in ``parameter.grad`` for a gradient that the engine keeps elsewhere.

Torch's operations on it are carried out on the sums, or raise. Setting to zero, multiplying by a number and adding a
tensor are done at every stage, without communication: each rank changes its part. Other operations need values, which
only a rank that has the whole reduced gradient can give.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from deepspeed.errors import CallOrderError
from deepspeed.nested import map_tensors, tensors_of
from deepspeed.torch_private import is_inside_backward

_aten = torch.ops.aten
_ADDITIONS = (_aten.add_.Tensor, _aten.add.Tensor)
_PRODUCTS = (_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar)
REMEDY = (
    "Set gradient_clipping in the configuration to clip; read and replace gradients with deepspeed.utils."
    "safe_get_full_grad and safe_set_full_grad, between the last backward and engine.step(); or use "
    "engine.backward(loss * factor). At every stage p.grad = None, p.grad.zero_(), p.grad.mul_(number) and "
    "p.grad.add_(tensor) work"
)


class GradientEntry(Protocol):
    """Gives access to the gradient of one parameter."""

    is_accumulated: bool  # autograd has added to it outside of a backward of this engine

    @property
    def name(self) -> str:
        """Returns the parameter's qualified name."""

    def whole(self) -> torch.Tensor | str:
        """Returns the whole reduced gradient, in the parameter's shape, as a view; or why this rank cannot give it."""

    def read(self, operation: str) -> torch.Tensor:
        """Returns a copy of the whole gradient in the parameter's dtype, or raises ``CallOrderError``."""

    def write(self, value: torch.Tensor) -> None:
        """Replaces the whole gradient."""

    def change(self, operation: Callable[[torch.Tensor], Any]) -> None:
        """Applies an operation in place, linear and elementwise, to this rank's parts of the gradient."""

    def add(self, other: torch.Tensor) -> None:
        """Adds a tensor, in memory of its own: the next reduction adds it to the sums."""

    def refuse_addition(self) -> None:
        """Raises ``CallOrderError`` if a program may not add to the gradient."""


class PendingGradient(torch.Tensor):
    """Stands in a parameter's ``.grad`` for the gradient that the engine has summed up since the last update.

    It has the shape, dtype and device of ``parameter``, and no memory. A view of it is one too.
    """

    _entry: weakref.ref[GradientEntry] | None
    _views: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    _more: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, entry: GradientEntry | None, like: torch.Tensor, views: Any = (), more: Any = None
    ) -> PendingGradient:
        """Makes one.

        Args:
            entry: The gradient; None: it is gone.
            views: Operations that lead from the whole gradient to this view of it.
            more: A tensor that is added if this object is assigned to ``.grad``; None: nothing.
        """
        made: PendingGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=like.dtype, device=like.untyped_storage().device
        )
        made._entry = None if entry is None else weakref.ref(entry)
        made._views = views
        made._more = more
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own declaration is that of a function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _operate(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        entry = None if self._entry is None else self._entry()
        name = "a discarded gradient" if entry is None else f"the gradient of {entry.name!r}"
        return f"PendingGradient({name}, shape {tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def entry(self, operation: str) -> GradientEntry:
        """Returns the entry of the parameter.

        Raises:
            CallOrderError: The gradient was discarded, or used by the update.
        """
        entry = None if self._entry is None else self._entry()
        if entry is None:
            raise CallOrderError(
                f"{operation} of a parameter.grad that was kept: its gradient was discarded, or used by the update. "
                "Keep parameter.grad.clone() instead, or deepspeed.utils.safe_get_full_grad(parameter)"
            )
        return entry

    def through(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns of ``whole``, in the parameter's shape, the view that this object is."""
        for view in self._views:
            whole = view(whole)
        return whole


def _operate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out one operation of torch that has a :class:`PendingGradient` among its arguments, or raises."""
    name = func.overloadpacket.__name__
    first: Any = args[0] if args else None
    if name == "_foreach_zero_":
        for one in args[0]:
            one.zero_()
        return None
    if name.endswith("_like"):
        return func(torch.empty(first.shape, dtype=first.dtype, device=first.device), *args[1:], **kwargs)
    if isinstance(first, PendingGradient):
        entry = first.entry(name)
        if func is _aten.detach.default:
            return PendingGradient(entry, first, first._views, first._more)
        if first._more is not None:
            raise CallOrderError(f"{name} of parameter.grad + tensor: assign that to parameter.grad first. {REMEDY}")
        if not first._views:
            if func in _ADDITIONS and isinstance(args[1], torch.Tensor):
                added = _add(entry, func, args, kwargs)
                if added is not None:
                    return added
            if func is _aten.zero_.default:
                entry.change(torch.Tensor.zero_)
                return first
            if func in _PRODUCTS and (factor := _number(args[1])) is not None:
                entry.change(lambda part: getattr(part, name)(factor))
                return first
    return _compute(func, name, args, kwargs)


def _number(value: Any) -> Any:
    """Returns a factor that is a number or a 0-dim tensor; None for another tensor."""
    if isinstance(value, torch.Tensor):
        return value if value.dim() == 0 and not isinstance(value, PendingGradient) else None
    return value


def _add(entry: GradientEntry, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Adds a tensor to the gradient, where values cannot be read; None where they can."""
    first, other = args[0], args[1]
    accumulates = is_inside_backward()
    if not accumulates and not isinstance(entry.whole(), str):
        return None
    if isinstance(other, PendingGradient):
        return None
    if not accumulates:
        entry.refuse_addition()
        other = (other * kwargs.get("alpha", 1)).to(first.dtype).expand(first.shape)
        if func is _aten.add.Tensor:
            return PendingGradient(entry, first, more=other)
    entry.add(other)
    if not accumulates:
        return first
    entry.is_accumulated = True  # autograd has no open backward here: see ProgramGradients.take_stray
    return first if func is _aten.add_.Tensor else other.clone()


def _compute(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on copies of the whole gradients, and copies back those that it has changed."""
    read: dict[int, tuple[PendingGradient, torch.Tensor, torch.Tensor]] = {}

    def value_of(argument: Any) -> Any:
        if not isinstance(argument, PendingGradient):
            return argument
        if id(argument) not in read:
            whole = argument.entry(name).read(name)
            read[id(argument)] = argument, whole, argument.through(whole)
        return read[id(argument)][2]

    schema = func._schema
    inner, named = map_tensors(args, value_of), map_tensors(kwargs, value_of)
    if any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns):
        pending = args[0] if args else None
        made = func(*inner, **named)
        if not isinstance(pending, PendingGradient) or not isinstance(made, torch.Tensor):
            raise CallOrderError(f"{name} of parameter.grad: makes several views of it; use parameter.grad.clone()")
        view = _view(func, args[1:], kwargs)
        return PendingGradient(pending.entry(name), made, (*pending._views, view))
    result = func(*inner, **named)
    changed: list[Any] = []
    for argument, value in zip(schema.arguments, args, strict=False):
        changed += tensors_of(value) if argument.alias_info is not None and argument.alias_info.is_write else []
    changed += [value for key, value in kwargs.items() if key == "out"]
    for value in changed:
        if isinstance(value, PendingGradient):
            value.entry(name).write(read[id(value)][1])
    by_value = {id(value): pending for pending, _, value in read.values()}
    return map_tensors(result, lambda one: by_value.get(id(one), one))


def _view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda whole: func(whole, *args, **kwargs)


def holds_values(parameter: torch.Tensor) -> bool:
    """Returns whether ``parameter.grad`` (any shape) is a gradient that the engine has not taken yet."""
    found = parameter.grad
    return found is not None and not isinstance(found, PendingGradient)
