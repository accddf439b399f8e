"""What a parameter is while its values are elsewhere.

Between uses a sharded parameter's ``data`` is an empty tensor: shape ``(0,)``, which the ecosystem tests for. An empty
tensor's ``sum()`` would be a plausible 0.0 and its ``fill_`` would be lost, so for as long as it is sharded the
parameter's *class* is ``ShardedParameter``, which intercepts torch functions. Inside the engine's forward and backward
a read gathers the bucket and goes on; elsewhere it raises and names the accessors. Metadata passes. While gathered the
parameter is a plain ``torch.nn.Parameter`` again and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from deepspeed.errors import ShardedAccessError

_GATHERER = "_ds_gather_for_use"

# Names of functions that read no values: they see the empty tensor, as the ecosystem expects.
_METADATA = frozenset(
    {
        "__get__",
        "__set__",
        "__delete__",
        "__hash__",
        "__repr__",
        "__reduce_ex__",
        "__deepcopy__",
        "__len__",
        "_is_view",
        "_version",
        "data_ptr",
        "detach",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_pinned",
        "is_same_size",
        "is_set_to",
        "is_shared",
        "is_signed",
        "layout",
        "ndimension",
        "nelement",
        "numel",
        "pin_memory",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "share_memory_",
        "size",
        "storage_offset",
        "stride",
        "type",
        "untyped_storage",
    }
)
_BLOCKED_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})


class ShardedParameter(torch.nn.Parameter):
    """The class of a parameter while it is sharded. Never instantiated: plain parameters are turned into it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _METADATA and not _reads_values(func):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for parameter in _sharded_in((args, kwargs)):
            gather = parameter.__dict__.get(_GATHERER)
            if gather is None or not gather():
                raise ShardedAccessError(_refusal(parameter, name or repr(func)))
        return func(*args, **kwargs)


def _reads_values(func: Callable[..., Any]) -> bool:
    """Getters of properties are all called ``__get__``; a few of them are computations."""
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", "") in _BLOCKED_PROPERTIES


def _sharded_in(value: Any) -> list[ShardedParameter]:
    found: list[ShardedParameter] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, ShardedParameter):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
    return found


def _refusal(parameter: torch.nn.Parameter, operation: str) -> str:
    name = parameter.__dict__.get("_ds_name", "a parameter")
    shape = tuple(parameter.__dict__.get("ds_shape", ()))
    return (
        f"{operation} on parameter {name!r} (full shape {shape}): it is sharded (ZeRO stage 3) and this call is "
        "outside the engine's forward and backward, so its values are not here. To read or change it, use "
        "`with deepspeed.zero.GatheredParameters(param, modifier_rank=...)`; to read only, "
        "deepspeed.utils.safe_get_full_fp32_param(param)"
    )


def mark_sharded(parameter: torch.nn.Parameter, empty: torch.Tensor) -> None:
    """Empties ``parameter`` and makes it intercept operations."""
    parameter.data = empty
    parameter.__class__ = ShardedParameter


def mark_full(parameter: torch.nn.Parameter, view: torch.Tensor) -> None:
    """Gives ``parameter`` its values and its plain class back."""
    parameter.__class__ = torch.nn.Parameter
    parameter.data = view


def set_gatherer(parameter: torch.nn.Parameter, gather: Callable[[], bool]) -> None:
    """Names the function that makes ``parameter`` full if that is allowed now, and returns whether it did."""
    parameter.__dict__[_GATHERER] = gather
