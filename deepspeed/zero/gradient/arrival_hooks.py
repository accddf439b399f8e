"""The hooks that announce the gradients of parameters, after the program's own hooks on the same parameters.

A hook of ``register_post_accumulate_grad_hook`` finds in ``.grad`` what one backward has computed on this rank, not the
sum over micro-batches as in plain torch. So a program's hook may change it only where there is no such sum yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import DisableTorchFunctionSubclass
from torch.utils.hooks import RemovableHandle

from deepspeed.errors import CallOrderError
from deepspeed.zero.gradient.gradient_bucket import GradientBucket

_Key = tuple[int, int]


class GradientReceiver(Protocol):
    """Learns that gradients have arrived."""

    def arrive(self, position: int, index: int) -> None:
        """Called with the position of a bucket and the index of a parameter in it."""


class ArrivalHooks:
    """Registers a hook on each trained parameter, and keeps it the last one.

    Torch keeps these hooks where the garbage collector cannot see them: they must not keep a parameter alive, or the
    engine, its memory and its process group would never be freed.

    Args:
        receiver: Gets each arrival; it is not kept alive.
    """

    def __init__(self, buckets: list[GradientBucket], receiver: GradientReceiver) -> None:
        self._buckets = buckets
        self._receiver = weakref.ref(receiver)
        self._handles: dict[_Key, RemovableHandle] = {}
        self._first: dict[_Key, RemovableHandle] = {}  # those before a program's hooks
        self._seen: dict[_Key, tuple[int, int]] = {}  # identity and version of .grad before a program's hooks

    def __bool__(self) -> bool:
        return bool(self._handles)

    def listen(self, positions: Iterable[int]) -> None:
        """Registers hooks on the parameters of some buckets that require a gradient now."""
        for position in positions:
            for index, parameter in enumerate(self._buckets[position].bucket.params):
                if parameter.requires_grad and (position, index) not in self._handles:
                    hook = parameter.register_post_accumulate_grad_hook(self._make_last(position, index))
                    self._handles[position, index] = hook

    def remove(self) -> None:
        """Takes the hooks from the parameters."""
        for hook in (*self._handles.values(), *self._first.values()):
            hook.remove()
        self._handles.clear()
        self._first.clear()

    def move_behind_others(self, positions: Iterable[int]) -> None:
        """Moves the hooks behind those that the program has registered since. Called before a backward."""
        with DisableTorchFunctionSubclass():
            for position in positions:
                for index, parameter in enumerate(self._buckets[position].bucket.params):
                    hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
                    if hooks is not None and len(hooks) > 1 and (position, index) in self._handles:
                        self._move(position, index, parameter, hooks)

    def _move(self, position: int, index: int, parameter: torch.nn.Parameter, hooks: dict[int, object]) -> None:
        key = position, index
        if key not in self._first:
            self._first[key] = parameter.register_post_accumulate_grad_hook(self._make_first(key))
        first, last = self._first[key].id, self._handles[key].id
        others = {number: hook for number, hook in hooks.items() if number not in (first, last)}
        ordered = {first: hooks[first], **others, last: hooks[last]}
        if list(ordered) != list(hooks):
            hooks.clear()
            hooks.update(ordered)

    def _make_first(self, key: _Key) -> Callable[[torch.Tensor], None]:
        seen = self._seen

        def look(parameter: torch.Tensor) -> None:
            seen[key] = _state_of(parameter)

        return look

    def _make_last(self, position: int, index: int) -> Callable[[torch.Tensor], None]:
        receiver, seen, own = self._receiver, self._seen, weakref.ref(self)

        def arrived(parameter: torch.Tensor) -> None:
            before = seen.pop((position, index), None) if seen else None
            if before is not None and before != _state_of(parameter) and (hooks := own()) is not None:
                hooks.refuse_change(position, index)
            if (alive := receiver()) is not None:
                alive.arrive(position, index)

        return arrived

    def refuse_change(self, position: int, index: int) -> None:
        """Raises if a program's hook has changed a gradient that is a part of a sum.

        Raises:
            CallOrderError: Earlier backwards have left a sum.
        """
        gradients = self._buckets[position]
        if gradients.had_sum:
            name = gradients.bucket.layout.tiles[index].name
            raise CallOrderError(
                f"register_post_accumulate_grad_hook on {name!r}: the hook changed parameter.grad, which torch would "
                "have summed over all backwards since the last update; here it is that of the latest one, and the "
                "sum is elsewhere. Use parameter.register_hook to change each gradient, or one backward per update"
            )


def _state_of(parameter: torch.Tensor) -> tuple[int, int]:
    grad = parameter.grad
    return (0, 0) if grad is None else (id(grad), grad._version)
