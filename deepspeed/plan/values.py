"""Runs the operations of a simulation: computes shapes, and supplies values that a program reads from the device.

Where the program requests a value (a norm, whether a mask is all true) it gets that of a healthy run: numbers are 1,
and nothing is infinite or NaN.

Without values, a result depends only on shapes, strides and dtypes of the arguments, so results of repeated operations
are cached (:class:`KnownShapes`). Cases where this is not certain are run: views, results that share storage,
operations outside torch, arguments with values or of a subclass, and 0-dim tensors (which may or may not take part in
type promotion as Python numbers). All this runs for about 2,000 operations per layer, so it is written for speed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from deepspeed.errors import NotYetSupportedError
from deepspeed.nested import tensors_of
from deepspeed.plan.memory import META, MemoryCount
from deepspeed.plan.timeline.operation_cost import OperationCost, OperationKind, cost_of, cost_of_lists
from deepspeed.plan.timeline.step_trace import CopyEvent, HostWaitEvent, OperationEvent, StepRecording
from deepspeed.profiling.flops_profiler.profile import product_formula
from deepspeed.torch_private import storage_key
from deepspeed.zero.placement import Tier

Count = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]
"""Returns the cost of an operation, given its arguments and its result."""
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_DATA_DEPENDENT = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view})
Made = tuple[Any, Any, bool | None]
"""The result of an operation, what it costs (None: nothing), and whether it is tensors with storage of their own (None:
not known)."""
aten = torch.ops.aten
_MOST_READ = 1 << 20  # most elements that a program may copy to the host, as made-up values


class _OperationKind(enum.Enum):
    NEW = enum.auto()  # makes new tensors
    IN_PLACE = enum.auto()  # writes its first argument, keeps its shape and returns it
    VIEW = enum.auto()  # returns a view of an argument
    OTHER = enum.auto()


_NEW, _IN_PLACE, _VIEW, _OTHER = _OperationKind  # looking up members of an enum would take longer than all the rest


class KnownShapes:
    """Caches the results of the operations of one simulation.

    Attributes:
        is_used: False: every operation is run.
    """

    is_used = True

    def __init__(self, count: Count) -> None:
        self._count = count
        self._effects: dict[
            int, tuple[_OperationKind, Any]
        ] = {}  # by id, as hashing an operation calls a Python function
        self._known: dict[Any, tuple[Any, Any]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made:
        """Runs one operation, or recreates its result from the cache."""
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
    # Composite operations (reshape, contiguous) may return a copy although their schema says view.
    is_composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    is_view = not is_composite and all(r.alias_info is not None for r in schema.returns)
    return _VIEW if is_view and not any(a.alias_info.is_write for a in shared) else _OTHER


def _facts(values: Any) -> tuple[Any, ...] | None:
    """Returns the cache key of arguments; None if the result may depend on something else."""
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
    """None unless the result is numbers and new tensors with their own storage.

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


class OperationCount(MemoryCount):
    """Counts memory and arithmetic of operations on ``meta`` tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__("meta")
        self._kind = kind
        self.trace = StepRecording()  # records operations, where it is on
        self.flops = 0  # floating-point operations of matrix products, convolutions and attention so far
        self.shapes = KnownShapes(arithmetic_of)  # the cache of results
        self._answers: dict[int, tuple[Any, Any]] = {}  # by id, as hashing an operation calls a Python function

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Activates the dispatch mode, and observes all memory trackers."""
        with super().counting(), _kernels_of(self._kind):
            yield

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool | None]:
        """Computes the shapes of one operation, or its values where they are known."""
        operation = id(func)
        if operation not in self._answers:
            self._answers[operation] = (_answer_to(func), func)
        answer = self._answers[operation][0]
        if answer is not None:
            found = answer(self, args, kwargs)
            if found is not NotImplemented:
                return found, None
        result, cost, is_new = self.shapes.run(func, args, kwargs)
        if cost is not None:
            self.add_cost(cost, args)
        return result, is_new

    def add_cost(self, cost: OperationCost, args: tuple[Any, ...]) -> None:
        """Counts and records an operation with these arguments."""
        self.flops += cost.flops
        if self.trace.is_on and cost.kind is not _FREE:
            self.trace.add(OperationEvent(cost, self._is_on_host(args), self.trace.stream))

    def _is_on_host(self, args: tuple[Any, ...]) -> bool:
        """Returns whether an operation works on host memory although the device has its own memory."""
        if not self._off_device or self._kind == "cpu":
            return False
        first = next((t for t in tensors_of(args) if t.dim() and t.layout is torch.strided), None)
        return first is not None and self.tier_of(first) is not Tier.DEVICE

    @override
    def _count_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        before = self.copied_up, self.copied_down
        super()._count_copy(target, source)
        up, down = self.copied_up - before[0], self.copied_down - before[1]
        if up or down:
            self.trace.add(CopyEvent(up or down, bool(up), self.trace.stream))


_FREE = OperationKind.FREE


def arithmetic_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, device_type: str = "meta"
) -> OperationCost:
    """Returns the cost of an operation with torch's arithmetic; tensors of ``device_type`` count."""
    formula = product_formula(func)
    flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
    return cost_of(func, args, kwargs, result, flops, device_type=device_type)


def _answer_to(func: Any) -> Any:
    name = func._schema.name
    if name.startswith(("aten::_fused_", "aten::_foreach_")) and name.endswith("_") and not func._schema.returns:
        return _nothing
    return _ANSWERS.get(func)


def _nothing(count: OperationCount, args: Any, _kwargs: Any) -> None:
    """Returns nothing, as updates of lists do; their values are not needed."""
    if count.trace.is_on:
        on_host = any(count._is_on_host(tuple(value)) for value in args if isinstance(value, (tuple, list)))
        count.trace.add(OperationEvent(cost_of_lists(args), on_host, count.trace.stream))


def _read_number(count: OperationCount, args: tuple[Any, ...], _kwargs: Any) -> Any:
    tensor = args[0]
    if tensor.device.type != "meta":
        return NotImplemented
    count.trace.add(HostWaitEvent())
    if tensor.dtype == torch.bool:
        return tensor.__dict__.get("_all_true", False)
    return 1.0 if tensor.is_floating_point() else 1


def _all_true(count: OperationCount, args: tuple[Any, ...], kwargs: Any) -> Any:
    if args[0].device.type != "meta":
        return NotImplemented
    made = aten.any.default(args[0])
    made._all_true = True
    return made


def _copy_to_host(_count: OperationCount, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, device = args[0], kwargs.get("device")
    if tensor.device.type != "meta" or device is None or torch.device(device).type != "cpu":
        return NotImplemented
    return _ones(tensor, kwargs.get("dtype") or tensor.dtype)


def _copy_into_host(_count: OperationCount, args: tuple[Any, ...], _kwargs: Any) -> Any:
    target, source = args[0], args[1]
    if source.device.type != "meta" or target.device.type == "meta":
        return NotImplemented
    return target.copy_(_ones(source, target.dtype))


def _ones(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if like.numel() > _MOST_READ:
        raise NotYetSupportedError(
            f"plan: the model copies a tensor of shape {tuple(like.shape)} to the host, where a simulation has no "
            "values for it; keep that out of forward and loss"
        )
    return torch.ones(like.shape, dtype=dtype)


def _counts(_count: OperationCount, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of ``bincount``, with ``minlength`` as its length."""
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    if args[0].device.type != "meta" or not least:
        return NotImplemented
    return torch.empty(least, dtype=torch.int64, device="meta")


def _grouped_product(count: OperationCount, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a product by groups, which torch has on ``meta`` for bf16 only."""
    one, other, *rest = args
    if one.device.type != "meta" or one.dtype is torch.bfloat16 or kwargs.get("out_dtype") is not None:
        return NotImplemented
    as_bf16 = aten._grouped_mm.default(one.to(torch.bfloat16), other.to(torch.bfloat16), *rest, **kwargs)
    made = torch.empty_strided(as_bf16.shape, as_bf16.stride(), dtype=one.dtype, device=META)
    count.add_cost(arithmetic_of(aten._grouped_mm.default, args, kwargs, made), args)
    return made


def _equal(_count: OperationCount, args: tuple[Any, ...], _kwargs: Any) -> Any:
    return True if any(t.device.type == "meta" for t in tensors_of(args)) else NotImplemented


class _FusedNorm(torch.autograd.Function):
    """RMSNorm as one kernel, which keeps its input and a number per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: list[int], weight: torch.Tensor) -> torch.Tensor:
        out, _, scale = aten.native_layer_norm.default(x, shape, weight, None, 0.0)  # moves the same number of bytes
        ctx.save_for_backward(x, weight, scale)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        made = aten._fused_rms_norm_backward.default(gradients[0], x, ctx.shape, scale, weight, [True, True])
        return made[0], None, made[1]


@contextmanager
def _kernels_of(kind: str) -> Iterator[None]:
    """Makes attention, RMSNorm and dropout on ``meta`` use the fused kernels that torch uses on a device of that kind.

    Otherwise torch would store the whole attention matrix, run a norm as ten operations, and keep a dropout's mask in
    the dtype of its input, not in one byte per element.
    """

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        same_width = query.dim() == 4 and query.shape[-1] == value.shape[-1]
        half = query.dtype in (torch.float16, torch.bfloat16)
        if kind == "cpu":
            if same_width and dropout_p == 0.0:
                return aten._scaled_dot_product_flash_attention_for_cpu(
                    query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
                )[0]
        elif same_width and half and attn_mask is None and query.shape[-1] <= 256:
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        elif same_width and query.shape[1] == key.shape[1]:
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    def rms_norm(
        x: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
    ) -> torch.Tensor:
        if weight is None or weight.dtype != x.dtype:
            made: torch.Tensor = aten.rms_norm.default.decompose(x, normalized_shape, weight, eps)
            return made
        return _FusedNorm.apply(x, normalized_shape, weight)  # type: ignore[no-any-return]

    def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if not train or p == 0.0 or not x.numel():
            return x
        return aten.native_dropout.default(x, p, True)[0] if p < 1.0 else x * 0.0

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", attend, "AutogradMeta")
        if kind != "cpu":
            library.impl("dropout", dropout, "AutogradMeta")
        if kind != "cpu" and hasattr(aten, "_fused_rms_norm_backward"):
            library.impl("rms_norm", rms_norm, "AutogradMeta")
        yield
    finally:
        library._destroy()


def _product_into(_count: OperationCount, args: Any, kwargs: Any) -> Any:
    """Returns ``out``: updates scale every chunk of gradients so, and torch takes milliseconds for it on ``meta``."""
    out = kwargs["out"]
    return out if out.is_meta and out.shape == args[0].shape else NotImplemented


_ANSWERS: dict[Any, Any] = {
    aten._local_scalar_dense.default: _read_number,
    aten.all.default: _all_true,
    aten._to_copy.default: _copy_to_host,
    aten.copy_.default: _copy_into_host,
    aten.bincount.default: _counts,
    aten.equal.default: _equal,
    aten._grouped_mm.default: _grouped_product,
    aten.mul.out: _product_into,
    aten.record_stream.default: lambda _count, _args, _kwargs: None,
}
