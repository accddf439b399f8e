"""Counts operations and takes times by module while a model runs forward.

:func:`cost` returns the floating-point operations and multiply-accumulates of one call, computed from shapes.

Matrix products, convolutions and attention are counted by torch's own table (``torch.utils.flop_counter``), with one
multiply-accumulate as two operations. Operators that it lacks are added here: products by groups and by vectors,
bilinear layers, distances, and whole recurrent and encoder layers in one kernel, of which only the products are
counted. Element-wise functions cost one operation per element of the result; normalizations and softmax cost
:data:`PER_ELEMENT`. Copies, casts, fills and views cost nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from deepspeed.accelerator import get_accelerator
from deepspeed.attention_products import OPERATIONS_OF_ATTENTION


@dataclass
class ModuleProfile:
    """Holds the counts and times of one module."""

    name: str  # its name in its parent; empty for the model
    kind: str  # its class
    description: str  # its ``extra_repr``
    depth: int  # 0 for the model
    own_params: int = 0  # elements of its own parameters; a shared parameter counts only where it is found first
    own_flops: int = 0  # operations that ran in it outside its children
    own_macs: int = 0  # multiply-accumulates among these
    seconds: float = 0.0  # total time of its forward calls, children included
    calls: int = 0  # number of forward calls
    children: list[ModuleProfile] = field(default_factory=list)  # the modules below it

    def walk(self) -> Iterator[ModuleProfile]:
        """Yields this module and all below it, in order."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def params(self) -> int:
        """Elements of parameters, children included."""
        return sum(each.own_params for each in self.walk())

    @property
    def flops(self) -> int:
        """Operations, children included."""
        return sum(each.own_flops for each in self.walk())

    @property
    def macs(self) -> int:
        """Multiply-accumulates, children included."""
        return sum(each.own_macs for each in self.walk())

    def clear(self) -> None:
        """Sets operations, times and calls to zero, children included."""
        for each in self.walk():
            each.own_flops = each.own_macs = each.calls = 0
            each.seconds = 0.0


class ForwardProfile:
    """Measures a model's forward calls from :meth:`start` to :meth:`stop`; ``ignored`` classes count for parents."""

    def __init__(self, model: nn.Module, ignored: Collection[type[nn.Module]] = ()) -> None:
        self._ignored = tuple(ignored)
        self._of: dict[nn.Module, ModuleProfile] = {}
        seen: set[nn.Parameter] = set()
        self.root = self._tree(model, "", 0, seen)
        self._open: list[tuple[ModuleProfile, float]] = []
        self._hooks: list[Any] = []
        self._counter: OperationCounter | None = None

    def _tree(self, module: nn.Module, name: str, depth: int, seen: set[nn.Parameter]) -> ModuleProfile:
        node = ModuleProfile(name, type(module).__name__, module.extra_repr(), depth)
        self._of[module] = node
        for parameter in module.parameters(recurse=False):
            node.own_params += _count_once(parameter, seen)
        for child_name, child in module.named_children():
            if child in self._of:
                continue
            if isinstance(child, self._ignored):
                node.own_params += sum(_count_once(parameter, seen) for parameter in child.parameters())
                continue
            node.children.append(self._tree(child, child_name, depth + 1, seen))
        return node

    @property
    def is_running(self) -> bool:
        """Whether calls are measured now."""
        return self._counter is not None

    def start(self) -> None:
        """Starts measuring. Raises RuntimeError: it is running already."""
        if self.is_running:
            raise RuntimeError("the flops profiler is running already; call stop_profile() before start_profile()")
        for module in self._of:
            self._hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        self._counter = OperationCounter(self._record)
        self._counter.__enter__()

    def stop(self) -> None:
        """Stops measuring and keeps the results."""
        if self._counter is None:
            return
        counter, self._counter = self._counter, None
        counter.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._open.clear()

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        get_accelerator().synchronize()
        self._open.append((self._of[module], time.perf_counter()))

    def _leave(self, module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        get_accelerator().synchronize()
        node = self._of[module]
        while self._open:  # an exception may have left calls open inside this one
            entered, started = self._open.pop()
            if entered is node:
                node.seconds += time.perf_counter() - started
                node.calls += 1
                return

    def _record(self, flops: int, macs: int) -> None:
        node = self._open[-1][0] if self._open else self.root
        node.own_flops += flops
        node.own_macs += macs


def _count_once(parameter: nn.Parameter, seen: set[nn.Parameter]) -> int:
    if parameter in seen:
        return 0
    seen.add(parameter)
    # A parameter that ZeRO-3 shards is empty and has its full size in ds_numel.
    return int(getattr(parameter, "ds_numel", parameter.numel()))


_aten = torch.ops.aten

PER_ELEMENT: dict[Any, int] = {
    _aten._softmax: 5,
    _aten._log_softmax: 5,
    _aten.native_layer_norm: 5,
    _aten.native_group_norm: 5,
    _aten.native_batch_norm: 5,
    _aten._fused_rms_norm: 4,
    _aten.sum: 1,
    _aten.mean: 1,
}
"""Operations per element of the operand or of the result, whichever is larger."""

_FREE = {
    _aten.copy_,
    _aten._to_copy,
    _aten.clone,
    _aten.fill_,
    _aten.zero_,
    _aten.fill,
    _aten.alias,
    _aten.lift_fresh,
    _aten.detach,
}

_METADATA_QUERIES = {
    torch.ops.prim.device.default,
    _aten.is_contiguous.default,
    _aten.is_contiguous.memory_format,
    _aten.is_strides_like_format.default,
    _aten.is_non_overlapping_and_dense.default,
    _aten.size.default,
    _aten.sym_size.default,
    _aten.stride.default,
    _aten.sym_stride.default,
    _aten.storage_offset.default,
    _aten.sym_storage_offset.default,
    _aten.numel.default,
    _aten.sym_numel.default,
    _aten.dim.default,
}


def _of_tensors(formula: Callable[..., int]) -> Callable[..., int]:
    """Returns a formula of shapes as one of an attention operator's arguments."""
    return lambda *args, **_kwargs: formula(*(each.shape for each in args if isinstance(each, torch.Tensor)))


def _matrix_by_vector(matrix: Any, *_args: Any, **_kwargs: Any) -> int:
    return 2 * int(matrix.numel())


def _sum_of_products(_added: Any, one: Any, other: Any, *_args: Any, **_kwargs: Any) -> int:
    return 2 * int(one.numel()) * int(other.shape[-1])


def _grouped_product(one: Any, other: Any, *_args: Any, **_kwargs: Any) -> int:
    """Returns the operations of a product by groups of rows; every row, or column, belongs to one group."""
    groups = one.shape[0] if one.dim() == other.dim() == 3 else 1
    return 2 * int(groups * one.shape[-2] * one.shape[-1] * other.shape[-1])


def _backward_of_grouped_product(one: Any, other: Any, *_args: Any, **_kwargs: Any) -> int:
    return 2 * _grouped_product(one, other)


def _trilinear(one: Any, weight: Any, other: Any, *expanded: Any, **_kwargs: Any) -> int:
    """Returns the operations of a bilinear layer: a multiply-accumulate for each weight and sample."""
    shapes = []
    for tensor, dims in zip((one, weight, other), expanded[:3], strict=True):
        shape = list(tensor.shape)
        for dim in sorted(dims):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 2 * math.prod(torch.broadcast_shapes(*shapes))


def _distances(points: Any, *_args: Any, out_val: Any, **_kwargs: Any) -> int:
    """Returns the operations of distances between points: a multiply-accumulate for each pair and coordinate."""
    return 2 * int(out_val.numel()) * int(points.shape[-1])


def _recurrent_layer(tokens: Any, *args: Any, **_kwargs: Any) -> int:
    """Returns the operations of a fused recurrent network: each token passes every weight matrix once."""
    listed = args[0] if isinstance(args[0], (tuple, list)) else args[:2]  # of all layers, or of one direction of one
    weights = sum(int(weight.numel()) for weight in listed if weight.dim() == 2)
    return 2 * int(tokens.numel()) // max(int(tokens.shape[-1]), 1) * weights


def _lengths(tokens: Any) -> list[int]:
    """Returns the tokens of each sample of ``[B, S, H]``, or of a nested tensor."""
    return [int(sample.shape[0]) for sample in tokens.unbind()]


def _fused_attention_layer(query: Any, key: Any, value: Any, hidden: int, *_args: Any, **_kwargs: Any) -> int:
    """Returns the operations of attention with its four projections."""
    rows = zip(_lengths(query), _lengths(key), _lengths(value), strict=True)
    return sum(
        2 * hidden * (hidden * (2 * asked + known + kept) + asked * (known + kept)) for asked, known, kept in rows
    )


def _fused_encoder_layer(tokens: Any, hidden: int, *args: Any, **kwargs: Any) -> int:
    width = int(args[_RISE].shape[0])
    return _fused_attention_layer(tokens, tokens, tokens, hidden) + 4 * hidden * width * sum(_lengths(tokens))


_RISE = 12  # place of the first feed-forward weight, behind the tokens and the hidden size

# Torch's table, and what it lacks.
_PRODUCTS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **{operator: _of_tensors(formula) for operator, formula in OPERATIONS_OF_ATTENTION.items()},
    _aten.linear: lambda rows, weight, *_args, **_kwargs: 2 * int(rows.numel()) * int(weight.shape[0]),
    _aten.mv: _matrix_by_vector,
    _aten.dot: _matrix_by_vector,
    _aten.vdot: _matrix_by_vector,
    _aten.addmv: lambda _added, matrix, *_args, **_kwargs: _matrix_by_vector(matrix),
    _aten.addbmm: _sum_of_products,
    _aten._addmm_activation: _sum_of_products,
    _aten._grouped_mm: _grouped_product,
    _aten._trilinear: _trilinear,
    _aten._cdist_forward: _distances,
    _aten._euclidean_dist: _distances,
    _aten._pdist_forward: _distances,
    _aten._native_multi_head_attention: _fused_attention_layer,
    _aten._transformer_encoder_layer_fwd: _fused_encoder_layer,
    _aten.mkldnn_rnn_layer: _recurrent_layer,
    _aten._cudnn_rnn: _recurrent_layer,
    _aten.miopen_rnn: _recurrent_layer,
}
_OF_TRANSFORMERS: dict[str, Callable[..., int]] = {
    "transformers::grouped_mm_fallback": _grouped_product,
    "transformers::grouped_mm_fallback_backward": _backward_of_grouped_product,
}


def product_formula(function: Any) -> Callable[..., int] | None:
    """Returns what counts an ATen overload's product operations from its arguments and ``out_val``, or None."""
    found = _PRODUCTS.get(getattr(function, "_overloadpacket", None))
    return found or _OF_TRANSFORMERS.get(getattr(getattr(function, "_schema", None), "name", ""))


def cost(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Returns ``(operations, multiply-accumulates)`` of one call."""
    packet = getattr(function, "_overloadpacket", None)
    product = product_formula(function)
    if product is not None:
        # Formulas of torch convert tensors to shapes themselves; most of ours ignore `out_val`.
        operations = int(product(*args, **kwargs, out_val=result))
        return operations, operations // 2
    per_element = PER_ELEMENT.get(packet)
    if per_element is not None:
        return per_element * max(_elements(args), _elements(result)), 0
    if packet not in _FREE and torch.Tag.pointwise in getattr(function, "tags", ()):
        return _elements(result), 0
    return 0, 0


def _elements(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    return value.numel() if isinstance(value, torch.Tensor) and value.is_floating_point() else 0


class OperationCounter(TorchDispatchMode):
    """Passes ``record`` the operations and multiply-accumulates of each call in the context that costs something."""

    def __init__(self, record: Callable[[int, int], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA_QUERIES:
            return NotImplemented  # then torch answers them itself
        packet = getattr(func, "_overloadpacket", None)
        is_known = product_formula(func) is not None or packet in PER_ELEMENT or packet in _FREE
        if not is_known and not any(isinstance(value, torch.Tensor) and value.is_nested for value in args):
            # Under inference_mode composite operators arrive undecomposed: count their parts.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        operations, products = cost(func, args, kwargs, result)
        if operations:
            self._record(operations, products)
        return result
