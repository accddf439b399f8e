"""The cost of an operation of a simulated step: kind of kernel, sizes, bytes read and written."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.nested import tensors_of
from deepspeed.plan.prediction.device_model import DeviceModel
from deepspeed.torch_private import storage_key


class OperationKind(enum.Enum):
    """Kinds of kernels."""

    MATMUL = "matrix product"
    ATTENTION = "attention"
    TRAFFIC = "elementwise"
    FREE = "free"  # no kernel: allocations, views, queries of shapes


@dataclass(frozen=True)
class OperationCost:
    """The cost of one operation."""

    name: str  # torch's name of the operation
    kind: OperationKind  # the kind of its kernel
    flops: int = 0  # floating-point operations, as torch counts them
    nbytes: int = 0  # bytes read and written
    sides: tuple[int, int, int, int] = (0, 0, 0, 0)  # m, n, k and number of matrix products; zeros otherwise
    head_size: int = 0  # head size of attention; 0 otherwise
    is_causal: bool = False  # attention is causal, so half of its operations count
    is_backward: bool = False  # a kernel of the backward

    def seconds(self, device: DeviceModel, *, fp8: bool = False) -> float:
        """Returns the seconds on a device.

        Args:
            fp8: Products of linear layers are in fp8 where all their sides are multiples of 16, with the casts of
                their operands, each of which is cast once for two products.
        """
        if self.kind is OperationKind.MATMUL:
            m, n, k, batch = self.sides
            fp8 = (
                fp8
                and device.device.fp8_flops > 0
                and self.name in _LINEAR
                and not any(s % _FP8_SIDE for s in (m, n, k))
            )
            casts = device.traffic(2 * (m * k + k * n)) if fp8 else 0.0
            return device.matmul(m, n, k, batch=batch, fp8=fp8) + casts
        if self.kind is OperationKind.ATTENTION:
            counted = self.flops / 2 if self.is_causal else self.flops
            return device.attention(counted, self.head_size, backward=self.is_backward)
        return device.traffic(self.nbytes) if self.kind is OperationKind.TRAFFIC else 0.0


FREE = OperationCost("", OperationKind.FREE)
_LINEAR = ("mm", "addmm")
_FP8_SIDE = 16  # the sides of a product in fp8 are multiples of it
_NO_KERNEL = (
    "empty",
    "new_empty",
    "lift_fresh",
    "promote_types",
    "detach",
    "alias",
    "equal",
    "is_same_size",
    "resize_",
    "set_",
    "record_stream",
)
_LOOKS_UP = frozenset({"embedding", "index_select", "gather", "index"})


def cost_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, flops: int, *, device_type: str = "meta"
) -> OperationCost:
    """Returns the cost of an operation; ``flops`` are torch's. Without tensors of ``device_type`` it costs nothing."""
    name = func._schema.name.removeprefix("aten::")
    given, made = list(tensors_of((args, kwargs))), list(tensors_of(result))
    if name.startswith(_NO_KERNEL) or not any(t.device.type == device_type for t in (*given, *made)):
        return FREE if not flops else OperationCost(name, OperationKind.FREE, flops)
    if "attention" in name:
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        return OperationCost(
            name,
            OperationKind.ATTENTION,
            flops,
            head_size=given[0].shape[-1],
            is_causal=bool(named.get("is_causal", False)),
            is_backward="backward" in name,
        )
    if flops:
        return OperationCost(name, OperationKind.MATMUL, flops, sides=_sides(name, made, flops))
    keys = {storage_key(tensor) for tensor in given}
    shares_storage = bool(made) and all(storage_key(tensor) in keys for tensor in made)
    if shares_storage and not name.endswith("_"):
        return FREE  # a view of an argument
    if name in _LOOKS_UP:
        return OperationCost(name, OperationKind.TRAFFIC, nbytes=2 * _nbytes(made))
    return OperationCost(name, OperationKind.TRAFFIC, nbytes=_nbytes(given) + _nbytes(made))


def cost_of_lists(args: tuple[Any, ...]) -> OperationCost:
    """Returns the cost of an in-place operation on lists of tensors: a copy of one list to another, or an update.

    An update reads all lists and writes all but the second, that of the gradients.
    """
    lists = [_nbytes(tensors_of(value)) for value in args if isinstance(value, (tuple, list))]
    written = sum(lists) - lists[1] if len(lists) > 2 else 0
    return OperationCost("lists", OperationKind.TRAFFIC, nbytes=sum(lists) + written)


def _sides(name: str, made: list[torch.Tensor], flops: int) -> tuple[int, int, int, int]:
    """Returns m, n, k and batch of a product; of a convolution those of an equal product."""
    out = made[0]
    if name in ("mm", "addmm", "bmm", "baddbmm") and out.dim() >= 2:
        m, n = out.shape[-2:]
        batch = out.shape[0] if out.dim() == 3 else 1
        return m, n, max(flops // max(2 * m * n * batch, 1), 1), batch
    n = out.shape[1] if out.dim() > 1 else 1
    m = max(out.numel() // max(n, 1), 1)
    return m, n, max(flops // max(2 * m * n, 1), 1), 1


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of tensors; of expanded ones only what is stored."""
    total = 0
    for tensor in tensors:
        if tensor.layout is torch.strided:
            total += min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
    return total
