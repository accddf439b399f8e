"""Model-state memory by formula, from the layout and the placement alone.

Psi is the number of elements of all buckets with their padding, N the number of ranks. Padding is part of the layout:
each parameter is rounded up to 64 elements and each bucket to N * 64.
"""

from __future__ import annotations

from deepspeed.zero.layout import BucketLayout, ModelLayout
from deepspeed.zero.placement import Placement

_ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}


def itemsize(dtype: str) -> int:
    """Bytes per element of a dtype by name."""
    return _ITEMSIZE.get(dtype, 4)


class MemoryFormula:
    """Bytes on one rank between two steps.

    Args:
        layout: Every bucket.
        placement: The ZeRO row.
    """

    def __init__(self, layout: ModelLayout, placement: Placement) -> None:
        self._layout = layout
        self._placement = placement
        self._ranks = layout.world_size

    def is_sharded(self, bucket: BucketLayout) -> bool:
        """Whether the compute parameters of ``bucket`` are freed between uses."""
        return self._placement.shard_params and self._ranks > 1 and bucket.index not in self._layout.persistent

    def compute(self) -> tuple[int, str]:
        """Compute parameters: the shard, or everything."""
        total = 0
        for bucket in self._layout.buckets:
            numel = bucket.slice_numel if self.is_sharded(bucket) else bucket.numel
            total += numel * itemsize(bucket.dtype)
        if not (self._placement.shard_params and self._ranks > 1):
            return total, "bytes x Psi"
        return total, "bytes x (Psi_sharded / N + Psi_persistent)"

    def _owned(self, bucket: BucketLayout) -> int:
        return bucket.slice_numel if self._placement.shard_master else bucket.numel

    def master(self) -> tuple[int, str]:
        """fp32 copies of 16-bit parameters."""
        total = sum(
            4 * self._owned(bucket)
            for bucket in self._layout.buckets
            if bucket.trainable and itemsize(bucket.dtype) < 4
        )
        return total, "4 x Psi / N" if self._placement.shard_master else "4 x Psi"

    def optimizer(self, states: int) -> tuple[int, str]:
        """Optimizer state: ``states`` fp32 numbers per element (two for Adam)."""
        total = sum(
            max(itemsize(bucket.dtype), 4) * states * self._owned(bucket)
            for bucket in self._layout.buckets
            if bucket.trainable
        )
        return total, f"{4 * states} x Psi / N" if self._placement.shard_master else f"{4 * states} x Psi"

    def gradients(self, *, accumulation: bool, reduced: bool, reduce_itemsize: int | None = None) -> tuple[int, str]:
        """Gradients between backward and step, or between micro-batches.

        Args:
            accumulation: More than one micro-batch per update.
            reduced: The boundary has passed; otherwise a micro-batch in between.
            reduce_itemsize: Bytes per element on the wire; None is the parameter's.
        """
        trained = [bucket for bucket in self._layout.buckets if bucket.trainable]
        if self._ranks == 1:
            if accumulation:
                return sum(max(4, itemsize(b.dtype)) * b.numel for b in trained), "4 x Psi"
            sizes = [(reduce_itemsize or itemsize(b.dtype)) * b.numel for b in trained]
            return sum(sizes), "bytes x Psi"
        if not reduced and not self._placement.shard_gradients:
            return sum(4 * b.numel for b in trained), "4 x Psi"
        total = sum(max(4, itemsize(b.dtype)) * self._owned(b) for b in trained)
        return total, "4 x Psi / N" if self._placement.shard_master else "4 x Psi"
