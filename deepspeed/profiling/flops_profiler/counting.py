"""What one operation costs: multiply-accumulates and floating-point operations, from the shapes it was called with.

Matrix products, convolutions and attention come from torch's own table (``torch.utils.flop_counter``), with one
multiply-accumulate as two operations. To these are added, per element of the result, one operation for element-wise
functions and :data:`PER_ELEMENT` for normalisations and softmax. Copies, casts, fills and views cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

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
"""Operations per element, of the larger of operand and result."""

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

_QUESTIONS = {
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


def _attention_on_the_host(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


# The host's fused attention is not in torch's table.
_PRODUCTS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_the_host,
}


def cost(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """``(operations, multiply-accumulates)`` of one call.

    Args:
        function: The overload of an ATen operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        result: What it returned.
    """
    packet = getattr(function, "_overloadpacket", None)
    product = _PRODUCTS.get(packet)
    if product is not None:
        # torch's formulas take shapes or tensors by a wrapper of their own; ours ignores `out_val`.
        operations = int(product(*args, **kwargs, out_val=result))
        return operations, operations // 2
    per_element = PER_ELEMENT.get(packet)
    if per_element is not None:
        return per_element * max(_elements(args), _elements(result)), 0
    if packet not in _FREE and torch.Tag.pointwise in getattr(function, "tags", ()):
        return _elements(result), 0
    return 0, 0


def _elements(value: Any) -> int:
    """Elements of the tensor, or of the first one of a tuple."""
    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    return value.numel() if isinstance(value, torch.Tensor) and value.is_floating_point() else 0


class OperationCounter(TorchDispatchMode):
    """While entered, reports the cost of each operation.

    Args:
        record: Takes operations and multiply-accumulates.
    """

    def __init__(self, record: Callable[[int, int], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            return NotImplemented  # torch answers these itself
        packet = getattr(func, "_overloadpacket", None)
        if packet not in _PRODUCTS and packet not in PER_ELEMENT and packet not in _FREE:
            # Under inference_mode composite operators arrive whole: count what they are made of.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        operations, products = cost(func, args, kwargs, result)
        if operations:
            self._record(operations, products)
        return result
