"""What a parameter is while its values are elsewhere.

Between uses a sharded parameter's ``data`` is an empty tensor: shape ``(0,)``, which the ecosystem tests for. An empty
tensor's ``sum()`` would be a plausible 0.0 and its ``fill_`` would be lost, so for as long as it is sharded the
parameter's *class* is ``ShardedParameter``, which intercepts torch functions. Inside the engine's forward and backward
a read gathers the bucket and continues; elsewhere it raises and names the accessors. Metadata can be read. While
gathered, the parameter has the class it was made with, ``torch.nn.Parameter`` as a rule, and costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import DisableTorchFunctionSubclass

from deepspeed.errors import ShardedAccessError
from deepspeed.logging import warn_once
from deepspeed.uncompiled import uncompiled
from deepspeed.zero.address import Address, address_of
from deepspeed.zero.untouched import is_untouched

# Names of functions that read no values: they see the empty tensor, as the ecosystem expects.
_METADATA = frozenset(
    {
        "__get__",
        "__set__",
        "__delete__",
        "__hash__",
        "__len__",
        "_has_compatible_shallow_copy_type",
        "_is_view",
        "_is_zerotensor",
        "_version",
        "data_ptr",
        "detach",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_conj",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_neg",
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
# The part of them that differs between the empty tensor and the whole.
_MEASURES = frozenset(
    {"shape", "ndim", "nbytes", "size", "dim", "ndimension", "numel", "nelement", "__len__", "stride"}
)
_COMPUTED_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# Module.to() and similar methods call these on every parameter; to the present dtype they change nothing.
_CONVERSIONS = frozenset({"to", "cpu", "cuda", "xpu", "float", "double", "half", "bfloat16"})
# These need a parameter's shape and dtype and none of its values: they get those of the whole.
_LIKE = frozenset({"empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"})

NOT_IN_A_GRAPH = (
    "ZeRO stage 3 gathers parameters here, which is no part of a compiled graph; compile without fullgraph=True"
)


def _operate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on a sharded parameter: as it is, or after a gather. Raises if neither is possible."""
    name = getattr(func, "__name__", "")
    attribute = _property_of(func) if name in ("__get__", "__set__") else ""
    if attribute == "data" or name == "detach":
        if _gather(args[0], args[:1]):
            return func(*args, **kwargs)
        if attribute == "data":
            return _guarded_data(args[0]) if name == "__get__" else _refuse_data(*args)
    if _showing_wholes and (attribute or name) in _MEASURES and not is_untouched():
        if address_of(args[0]) is not None:
            return func(_whole_of(args[0]), *args[1:], **kwargs)
    if name in _METADATA and attribute not in _COMPUTED_PROPERTIES:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in _LIKE and args and address_of(args[0]) is not None:
        return func(_whole_of(args[0]), *args[1:], **{"device": args[0].device, **kwargs})
    if name in _CONVERSIONS and _keeps_dtype(func, args, kwargs):
        return args[0]
    needed = _sharded_in((args, kwargs))
    for parameter in needed:
        if not _gather(parameter, needed):
            raise ShardedAccessError(_refusal(address_of(parameter), name or repr(func)))
    return func(*args, **kwargs)


def _whole_of(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the shape and dtype of all of a parameter, and without values."""
    address = address_of(parameter)
    assert address is not None, "a sharded parameter has an address"
    with DisableTorchFunctionSubclass():
        return parameter.new_empty(address.shape, device="meta", requires_grad=False)


_showing_wholes = False


@contextmanager
def showing_wholes() -> Iterator[None]:
    """Gives sharded parameters the ``shape``, ``numel`` and the like of the full parameter inside the context."""
    global _showing_wholes
    before, _showing_wholes = _showing_wholes, True
    try:
        yield
    finally:
        _showing_wholes = before


class ShardedParameter(torch.nn.Parameter):
    """The class of a parameter while it is sharded. Never instantiated: parameters are turned into it."""

    @classmethod
    @partial(uncompiled, reason=NOT_IN_A_GRAPH)  # neither in the graph nor, being Python, compiled by itself
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _operate(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        address = address_of(self)
        if address is None:
            return "Parameter of unknown name (its values are gone)"
        bucket = address.bucket
        return (
            f"Parameter {address.name!r} of shape {address.shape} and dtype {self.dtype}, sharded over "
            f"{bucket.transport.size} ranks, requires_grad={self.requires_grad}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            address = address_of(self)
            assert address is not None, "a sharded parameter has an address"
            memo[id(self)] = address.bucket.copy_parameter(address.tile, self, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        note_placeholders("pickling a module or parameter")
        with DisableTorchFunctionSubclass():
            empty = torch.empty(0, dtype=self.dtype, device=self.device)
            return torch._utils._rebuild_parameter, (empty, self.requires_grad, OrderedDict())


def note_placeholders(call: str) -> None:
    """Warns once that what ``call`` returned holds empty tensors for sharded parameters."""
    warn_once(
        f"placeholders:{call}",
        f"{call}: parameters are sharded (ZeRO stage 3), so it holds an empty tensor of size 0 for each of them. For "
        "the values use engine.save_checkpoint, engine.save_16bit_model, engine.iter_full, or "
        "deepspeed.zero.GatheredParameters around the call",
    )


def _property_of(func: Callable[..., Any]) -> str:
    """Getters and setters of properties are all called ``__get__`` and ``__set__``; this is the property's name."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def _gather(parameter: torch.nn.Parameter, together: Sequence[torch.Tensor]) -> bool:
    """Makes a parameter full if that is allowed now."""
    address = address_of(parameter)
    gatherer = None if address is None else address.bucket.gatherer
    return gatherer is not None and gatherer(parameter, together)


class ShardedData(torch.Tensor):
    """The value of ``parameter.data`` while the parameter is sharded: empty, and not to be computed with."""

    @classmethod
    @partial(uncompiled, reason=NOT_IN_A_GRAPH)
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        attribute = _property_of(func) if name in ("__get__", "__set__") else ""
        if name in _METADATA and attribute not in _COMPUTED_PROPERTIES:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        mine = next((arg for arg in args if isinstance(arg, ShardedData)), None)
        raise ShardedAccessError(_refusal(mine.__dict__.get("_ds_data_of") if mine is not None else None, name))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<no values here: {self.__dict__.get('_ds_data_of')!r}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        with DisableTorchFunctionSubclass():
            return torch.empty(0, dtype=self.dtype, device=self.device).__reduce_ex__(protocol)


def _guarded_data(parameter: torch.Tensor) -> torch.Tensor:
    with DisableTorchFunctionSubclass():
        data = parameter.detach().as_subclass(ShardedData)
    data.__dict__["_ds_data_of"] = address_of(parameter)
    return data


def _refuse_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    if value is not parameter and value.numel():  # Module.to() assigns what its conversion returned
        raise ShardedAccessError(_refusal(address_of(parameter), "assigning to .data"))


def _keeps_dtype(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a conversion keeps the dtype; a move to another device is then left undone, with a warning.

    Frameworks move a whole model to the CPU when they are done with it. The shards stay with the engine, which gathers
    them on its own device again when the model is used.
    """
    if not isinstance(args[0], ShardedParameter):
        return False
    with DisableTorchFunctionSubclass():
        empty = args[0].detach()
        result = func(empty, *args[1:], **kwargs)
        if not isinstance(result, torch.Tensor) or result.dtype != empty.dtype or result.is_meta:
            return False
        moves, device, target = result.device != empty.device, empty.device, result.device
    if moves:
        warn_once(
            f"move:{target.type}",
            f"moving the model to {target}: its parameters are sharded (ZeRO stage 3) and their shards stay with the "
            f"engine, which computes on {device}; to free that memory use engine.destroy() or engine.offload_states()",
        )
    return True


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


def _refusal(address: Address | None, operation: str) -> str:
    name, shape = ("unknown", ()) if address is None else (address.name, address.shape)
    return (
        f"{operation} on parameter {name!r} (full shape {shape}): it is sharded (ZeRO stage 3) and this call is "
        "outside the engine's forward and backward, so its values are not here. To read or change it, use "
        "`with deepspeed.zero.GatheredParameters(param, modifier_rank=...)`; to read only, "
        "deepspeed.utils.safe_get_full_fp32_param(param)"
    )


def mark_sharded(parameter: torch.nn.Parameter, empty: torch.Tensor) -> None:
    """Replaces the values of ``parameter`` by a placeholder and makes it intercept operations.

    Args:
        parameter: The parameter.
        empty: 1-D without elements, or the full shape over the memory of one element.
    """
    if type(parameter) is ShardedParameter:  # it goes from one bucket to another
        with DisableTorchFunctionSubclass():
            parameter.data = empty
        return
    parameter.data = empty
    parameter.__class__ = ShardedParameter


def mark_full(
    parameter: torch.nn.Parameter, view: torch.Tensor, kind: type[torch.nn.Parameter] = torch.nn.Parameter
) -> None:
    """Gives ``parameter`` its values back, a view in the full shape, and the class it was made with."""
    parameter.__class__ = kind
    parameter.data = view


def plain_class(parameter: torch.nn.Parameter) -> type[torch.nn.Parameter]:
    """Returns the class to give back to a parameter when it is full."""
    kind = type(parameter)
    if kind is not ShardedParameter:
        return kind
    return parameter.__dict__.get(_CLASS, torch.nn.Parameter)


_CLASS = "_ds_class"


def remember_class(parameter: torch.nn.Parameter) -> type[torch.nn.Parameter]:
    """Notes the class of a parameter that is full, for :func:`plain_class`; nothing is stored for the usual one."""
    kind = plain_class(parameter)
    if kind is not torch.nn.Parameter:
        parameter.__dict__[_CLASS] = kind
    return kind
