"""Sharded parameters: the bucket and position of each, and what operations on them do.

A *bucket* is an engine's bucket (``zero.bucket``) or a provisional one, made by ``zero.Init`` before there is an engine
(``zero.construction.provisional``). Every parameter in a bucket has an *address*: the bucket and the tile.
Code that reads, gathers or moves a parameter starts from there.

Between uses a sharded parameter's ``data`` is an empty tensor: shape ``(0,)``, which the ecosystem tests for. An empty
tensor's ``sum()`` would be a plausible 0.0 and its ``fill_`` would be lost, so for as long as it is sharded the
parameter's *class* is ``ShardedParameter``, which intercepts torch functions. Inside the engine's forward and backward
a read gathers the bucket and continues; elsewhere it raises and names the accessors. Metadata can be read. ``data`` and
``detach()``, and so the tensors of a state dict, are ``ShardedData`` there, which raises at the first use of a value.
Torch gives no hook to ``torch.tensor`` of a parameter and to its legacy DLPack function: these return empty tensors, as
``parameter.data_ptr()`` is 0.
While gathered, the parameter has the class it was made with, ``torch.nn.Parameter`` as a rule, and costs nothing.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, Protocol

import torch
from torch import DisableTorchFunctionSubclass

from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import ShardedAccessError
from deepspeed.logging import warn_once
from deepspeed.uncompiled import uncompiled
from deepspeed.zero.group import BucketGroup
from deepspeed.zero.tiling.layout import BucketLayout, Fragment
from deepspeed.zero.untouched import is_untouched


class State(Enum):
    """The states of a bucket: where the values of its parameters are; see ``zero.bucket``."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"


Gatherer = Callable[[torch.nn.Parameter, Sequence[torch.Tensor]], bool]
"""Called with a sharded parameter that an operation reads, and with all sharded parameters of the operation. Makes
the parameter full and returns True where it may: inside the engine's forward and backward."""


@dataclass
class Loan:
    """A parameter that ``GatheredParameters`` keeps full."""

    depth: int = 0  # number of open contexts that requested it
    # its values in storage of their own, or None where the parameter was full anyway
    tensor: torch.Tensor | None = None
    # the values to be restored when the context discards edits; None where nothing needs it
    backup: torch.Tensor | None = None
    version: int = 0  # the parameter's version counter when the first context was entered


class ParameterBucket(Protocol):
    """Describes what a bucket of parameters has, an engine's or a provisional one."""

    layout: BucketLayout  # where each parameter lies
    dtype: torch.dtype  # the dtype of the parameters
    device: torch.device  # where they compute
    group: BucketGroup  # the ranks that share them
    is_sharded: bool  # whether a rank keeps only its slice between uses
    # whether the placement shards parameters, so that the ecosystem's ``ds_*`` attributes exist; small parameters and
    # those of a group of one may be resident anyway
    is_partitioned: bool
    state: State  # where the values are
    shard: torch.Tensor  # this rank's slice, 1-D; for a resident bucket a view of all values
    loans: dict[int, Loan]  # parameters that ``GatheredParameters`` keeps full, by tile
    pins: int  # contexts that keep the whole bucket full
    gatherer: Gatherer | None  # makes a parameter full if that is allowed now, and returns whether it did; None: never

    @property
    def owner(self) -> Any:
        """The ZeRO runtime that trains the parameters, or has done so and is still there; else None."""

    @property
    def is_trained(self) -> bool:
        """Returns whether a runtime has the parameters now."""

    @property
    def transport(self) -> Transport:
        """Carries the parameters."""

    def fragment(self, tile: int) -> Fragment | None:
        """Returns the fragment of a tile that lies in this rank's slice, or None."""

    def as_gathered(self, fragment: Fragment) -> torch.Tensor:
        """Returns this rank's fragment as it is when gathered, 1-D."""

    def keep_fragment(self, fragment: Fragment, values: torch.Tensor) -> None:
        """Writes this rank's fragment of a parameter into the shard and, where it differs, into the master.

        Args:
            values: 1-D, of that fragment.
        """

    def start_loan(self, tile: int, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        """Makes one parameter full with values in a tensor of its own, in the parameter's shape."""

    def end_loan(self, tile: int, parameter: torch.nn.Parameter) -> None:
        """Undoes :meth:`start_loan`; the values of the loaned tensor are dropped."""

    def copy_parameter(self, tile: int, parameter: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Returns ``copy.deepcopy`` of a sharded parameter: one with the same values, in a bucket of no engine."""


_ADDRESS = "_ds_address"
_numbers = itertools.count()


class Address:
    """Describes where a parameter's values are kept."""

    __slots__ = ("active_modules", "bucket", "number", "tile")

    def __init__(self, bucket: ParameterBucket, tile: int, number: int) -> None:
        self.bucket = bucket
        self.tile = tile  # index of the parameter in it
        self.number = number  # unique in this process; stays with the parameter when it moves (``ds_id``)
        # for programs that clear ``ds_active_sub_modules``; nothing here needs it
        self.active_modules: set[Any] = set()

    def __reduce__(self) -> Any:
        return _nowhere, ()  # a saved or copied parameter belongs to no bucket

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __repr__(self) -> str:
        return f"parameter {self.name!r} of full shape {self.shape}"

    @property
    def name(self) -> str:
        """Qualified name of the parameter."""
        return self.bucket.layout.tiles[self.tile].name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full parameter."""
        return self.bucket.layout.tiles[self.tile].shape

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return self.bucket.layout.tiles[self.tile].numel


def _nowhere() -> None:
    return None


def address_of(parameter: torch.Tensor) -> Address | None:
    """Returns the address of a parameter (any shape, sharded or not), or None where it belongs to no bucket."""
    return parameter.__dict__.get(_ADDRESS)


def is_zero_param(parameter: object) -> bool:
    """Returns whether ``parameter`` is partitioned (ZeRO stage 3), so that its ``ds_*`` attributes exist."""
    address = address_of(parameter) if isinstance(parameter, torch.Tensor) else None
    return address is not None and address.bucket.is_partitioned


def set_address(parameter: torch.Tensor, bucket: ParameterBucket, tile: int) -> Address:
    """Gives a parameter (any shape, sharded or not) a new address; its number stays the same."""
    old = address_of(parameter)
    address = Address(bucket, tile, next(_numbers) if old is None else old.number)
    parameter.__dict__[_ADDRESS] = address
    return address


def forget_address(parameter: torch.Tensor) -> None:
    """Takes a parameter out of its bucket; it keeps values of its own. It must be full, in its own shape."""
    parameter.__dict__.pop(_ADDRESS, None)


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of a parameter, sharded or not."""
    address = address_of(parameter)
    return tuple(parameter.shape) if address is None else address.shape


def full_numel(parameter: torch.Tensor) -> int:
    """Returns the elements of a parameter in its full shape, sharded or not."""
    address = address_of(parameter)
    return parameter.numel() if address is None else address.numel


# -- operations on a sharded parameter ---------------------------------------------------------------------------------

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
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "share_memory_",
        "size",
        "storage_offset",
        "stride",
        "type",
    }
)
# Those whose result differs between the empty tensor and the full parameter.
_MEASURES = frozenset(
    {"shape", "ndim", "nbytes", "size", "dim", "ndimension", "numel", "nelement", "__len__", "stride"}
)
_COMPUTED_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__"})
# Module.to() and similar methods call these on every parameter; to the present dtype they change nothing.
_CONVERSIONS = frozenset({"to", "cpu", "cuda", "xpu", "float", "double", "half", "bfloat16", "type"})
# These need a parameter's shape and dtype and none of its values: they get those of the whole.
_LIKE = frozenset({"empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"})

_EXPORT = "export a plain copy of the model that has loaded the weights of engine.export_weights()"
NOT_IN_A_GRAPH = (
    "ZeRO stage 3 gathers parameters here, which is no part of a compiled graph; compile without fullgraph=True, and "
    + _EXPORT
)


def _operate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on a sharded parameter: as it is, or after a gather. Raises if neither is possible."""
    name = getattr(func, "__name__", "")
    attribute = _property_of(func) if name in ("__get__", "__set__") else ""
    if attribute == "data" or name in ("detach", "data_ptr"):
        if _gather(args[0], args[:1]):
            return func(*args, **kwargs)
        if name == "__set__":
            return _refuse_data(*args)
        if name != "data_ptr":  # libraries compare addresses, and count by them: a null pointer is read by nobody
            return _guarded_data(args[0])
    if attribute == "grad" and name == "__set__":
        return set_gradient(*args)
    if _showing_wholes and (attribute or name) in _MEASURES and not is_untouched():
        if address_of(args[0]) is not None:
            return func(_whole_of(args[0]), *args[1:], **kwargs)
    if _is_metadata(name, attribute, args):
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


def _is_metadata(name: str, attribute: str, args: tuple[Any, ...]) -> bool:
    """Returns whether a call reads no values; ``type`` with an argument converts."""
    if name == "type":
        return len(args) == 1
    return name in _METADATA and attribute not in _COMPUTED_PROPERTIES


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Sets ``.grad``; for a sharded parameter to a gradient in its full shape, which torch would refuse."""
    with DisableTorchFunctionSubclass():
        address, present = address_of(parameter), parameter.data
        is_full = gradient is None or gradient.shape == present.shape
        if is_full or address is None or gradient is None or tuple(gradient.shape) != address.shape:
            parameter.grad = gradient
            return
        parameter.data = present.new_empty(()).expand(address.shape)
        try:
            parameter.grad = gradient
        finally:
            parameter.data = present


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
    @partial(uncompiled, reason=NOT_IN_A_GRAPH)  # kept out of graphs, and not compiled separately
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
        empty = _pickled(self, address_of(self))
        return torch._utils._rebuild_parameter, (empty, self.requires_grad, OrderedDict())


def _pickled(tensor: torch.Tensor, address: Address | None) -> torch.Tensor:
    """Returns the empty tensor that a new process gets for a sharded one. Raises for any other pickling.

    Loaders start their processes with what a data set or collator refers to, such as the model.
    """
    if get_spawning_popen() is None:
        raise ShardedAccessError(_refusal(address, "pickling (torch.save, copy.copy, a queue)"))
    note_placeholders("starting a process with a module or parameter")
    with DisableTorchFunctionSubclass():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def note_placeholders(call: str) -> None:
    """Warns once that what ``call`` returned holds empty tensors for sharded parameters."""
    warn_once(
        f"placeholders:{call}",
        f"{call}: parameters are sharded (ZeRO stage 3), so it holds an empty tensor of size 0 for each of them, "
        "whose use raises. For the values use engine.save_checkpoint, engine.save_16bit_model, engine.iter_full, or "
        "deepspeed.zero.GatheredParameters around the call",
    )


def _property_of(func: Callable[..., Any]) -> str:
    """Returns the name of a property from its getter or setter, which are called ``__get__`` and ``__set__``."""
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", "") or getattr(getattr(owner, "fget", None), "__name__", "")


def _gather(parameter: torch.nn.Parameter, together: Sequence[torch.Tensor]) -> bool:
    """Makes a parameter full if that is allowed now."""
    address = address_of(parameter)
    gatherer = None if address is None else address.bucket.gatherer
    return gatherer is not None and gatherer(parameter, together)


def gather_for_use(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Makes sharded parameters full where an operation on them would: before a compiled function, which takes all."""
    for parameter in parameters:
        if isinstance(parameter, ShardedParameter):
            _gather(parameter, ())


class ShardedData(torch.Tensor):
    """The value of ``parameter.data`` and of ``detach()`` while it is sharded: empty, and not to be computed with."""

    @classmethod
    @partial(uncompiled, reason=NOT_IN_A_GRAPH)
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        attribute = _property_of(func) if name in ("__get__", "__set__") else ""
        if name == "detach" or (attribute == "data" and name == "__get__"):
            return args[0]
        if name != "data_ptr" and _is_metadata(name, attribute, args):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        mine = next((arg for arg in args if isinstance(arg, ShardedData)), None)
        raise ShardedAccessError(_refusal(mine.__dict__.get("_ds_data_of") if mine is not None else None, name))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own declaration is that of a function
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raises for what no torch function announces: ``torch.tensor(data)``, ``torch.func``, constructors."""
        address = next((arg.__dict__.get("_ds_data_of") for arg in args if isinstance(arg, ShardedData)), None)
        raise ShardedAccessError(_refusal(address, str(func)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<no values here: {self.__dict__.get('_ds_data_of')!r}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _pickled(self, self.__dict__.get("_ds_data_of")).__reduce_ex__(protocol)


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
    export = f"; for torch.export, {_EXPORT}" if operation == "untyped_storage" else ""  # what it calls first
    return (
        f"{operation} on parameter {name!r} (full shape {shape}): it is sharded (ZeRO stage 3) and this call is "
        "outside the engine's forward and backward, so its values are not here. To read or change it, use "
        "`with deepspeed.zero.GatheredParameters(param, modifier_rank=...)`; to read only, "
        f"deepspeed.utils.safe_get_full_fp32_param(param){export}"
    )


def mark_sharded(parameter: torch.nn.Parameter, empty: torch.Tensor) -> None:
    """Replaces the values of ``parameter`` by a placeholder and makes it intercept operations.

    Args:
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
    """Returns the class that a parameter has while its values are gathered."""
    kind = type(parameter)
    if kind is not ShardedParameter:
        return kind
    return parameter.__dict__.get(_CLASS, torch.nn.Parameter)


_CLASS = "_ds_class"


def remember_class(parameter: torch.nn.Parameter) -> type[torch.nn.Parameter]:
    """Stores the class of a gathered parameter for :func:`plain_class`; ``torch.nn.Parameter`` is not stored."""
    kind = plain_class(parameter)
    if kind is not torch.nn.Parameter:
        parameter.__dict__[_CLASS] = kind
    return kind
