"""Model-state memory by formula, from the layout and the placement alone.

Psi is the number of elements of all buckets with their padding, N the number of ranks in a bucket's group, and S the
number of neighbors that share if not all do (``placement.py``). Padding is part of the layout: each parameter is
rounded up to 64 elements and each bucket to N * 64.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from deepspeed.zero.placement import BucketPlacement, Placement, Tier
from deepspeed.zero.tiling.layout import BucketLayout, ModelLayout

_BITS = re.compile(r"[a-z]+(\d+)")


def itemsize(dtype: str) -> int:
    """Returns the bytes per element of a dtype by name."""
    bits = _BITS.match(dtype)
    return max(int(bits[1]) // 8, 1) if bits is not None else 1  # bool


class MemoryFormula:
    """Bytes on one rank between two steps, in one tier.

    Args:
        host_is_device: The model computes in host memory, so that fp32 compute parameters in either tier can be their
            own masters.
        placed: Where each bucket is, if some began to be trained after the others; None: where the placement puts them.
    """

    def __init__(
        self,
        layout: ModelLayout,
        placement: Placement,
        *,
        host_is_device: bool = False,
        placed: Sequence[BucketPlacement] | None = None,
    ) -> None:
        self._layout = layout
        self.placement = placement  # the ZeRO row
        self._placed = placement.of_buckets(layout) if placed is None else tuple(placed)
        self._host_is_device = host_is_device

    def compute(self, tier: Tier = Tier.DEVICE) -> tuple[int, str]:
        """Returns the bytes of compute parameters (the shard, or everything), and their formula."""
        total = 0
        for bucket, placed in zip(self._layout.buckets, self._placed, strict=True):
            if placed.param_tier is tier:
                numel = bucket.slice_numel if placed.is_sharded else bucket.numel
                total += numel * itemsize(bucket.dtype)
        if not any(placed.is_sharded for placed in self._placed):
            return total, "bytes x Psi"
        ranks = "S" if self.has_copies else "N"
        if tier is not Tier.DEVICE:
            return total, f"bytes x Psi_offloaded / {ranks}"
        return total, f"bytes x (Psi_sharded / {ranks} + Psi_persistent)"

    def compute_tensors(self, tier: Tier) -> list[tuple[int, int]]:
        """Returns ``(elements, bytes per element)`` of the compute tensors of a tier."""
        return [
            (bucket.slice_numel if placed.is_sharded else bucket.numel, itemsize(bucket.dtype))
            for bucket, placed in zip(self._layout.buckets, self._placed, strict=True)
            if placed.param_tier is tier
        ]

    def owned_numel(self, bucket: BucketLayout) -> int:
        """Returns the elements of a bucket whose masters this rank has."""
        if not self.placement.shard_master:
            return bucket.numel
        return bucket.slice_numel // (bucket.replicas if self.placement.spread_master else 1)

    @property
    def owners(self) -> str:
        """The number of ranks that share a master, as a divisor of elements."""
        return "S" if self.has_copies and not self.placement.spread_master else "N"

    @property
    def has_copies(self) -> bool:
        """Returns whether several ranks hold the same slices."""
        return any(bucket.replicas > 1 for bucket in self._layout.buckets)

    @property
    def trained_buckets(self) -> list[BucketLayout]:
        """The trained buckets, in model order."""
        return [bucket for bucket, _ in self._trained()]

    def _trained(self) -> list[tuple[BucketLayout, BucketPlacement]]:
        return [(b, p) for b, p in zip(self._layout.buckets, self._placed, strict=True) if b.trainable]

    def has_master(self, bucket: BucketLayout, placed: BucketPlacement) -> bool:
        """Returns whether a trained bucket has a master besides its compute parameters."""
        if self.master_itemsize(bucket) != itemsize(bucket.dtype) or Tier.FILE in (
            placed.param_tier,
            placed.master_tier,
        ):
            return True
        return placed.param_tier is not placed.master_tier and not self._host_is_device

    def master_itemsize(self, bucket: BucketLayout) -> int:
        """Returns the bytes per element of a master."""
        size = itemsize(bucket.dtype)
        return size if self.placement.narrow_masters else max(size, 4)

    def master(self, tier: Tier = Tier.DEVICE) -> tuple[int, str]:
        """Returns the bytes of masters, where the compute parameters are not their own, and their formula."""
        total = sum(
            self.master_itemsize(bucket) * self.owned_numel(bucket)
            for bucket, placed in self._trained()
            if placed.master_tier is tier and self.has_master(bucket, placed)
        )
        size = 2 if self.placement.narrow_masters else 4
        return total, f"{size} x Psi / {self.owners}" if self.placement.shard_master else f"{size} x Psi"

    def master_tensors(self, state_itemsizes: Sequence[int], tier: Tier) -> list[tuple[int, int]]:
        """Returns ``(elements, bytes per element)`` of masters and states of a tier."""
        found = []
        for bucket, placed in self._trained():
            if placed.master_tier is tier:
                sizes = [self.master_itemsize(bucket)] if self.has_master(bucket, placed) else []
                own = itemsize(bucket.dtype) if self.placement.narrow_states else max(itemsize(bucket.dtype), 4)
                sizes += [size * own // 4 for size in state_itemsizes]
                found += [(self.owned_numel(bucket), size) for size in sizes]
        return found

    def optimizer(self, states: int, tier: Tier = Tier.DEVICE) -> tuple[int, str]:
        """Returns the bytes of optimizer state, ``states`` numbers per element (two for Adam), and their formula."""
        total = sum(n * size for n, size in self.master_tensors([4] * states, tier)) - self.master(tier)[0]
        size = 2 if self.placement.narrow_states else 4
        return total, f"{size * states} x Psi" + (f" / {self.owners}" if self.placement.shard_master else "")

    def shadow(self, states: int) -> tuple[int, str]:
        """Returns the bytes of the host's second masters, states and compute parameters, and their formula."""
        if not self.placement.speculates:
            return 0, "0"
        total = 0
        for bucket, placed in self._trained():
            if placed.master_tier is Tier.HOST:
                wide = max(itemsize(bucket.dtype), 4)
                out = itemsize(bucket.dtype) if self.has_master(bucket, placed) else 0
                total += self.owned_numel(bucket) * (wide * (1 + states) + out)
        return total, f"({4 * (1 + states)} + bytes) x Psi" + (
            f" / {self.owners}" if self.placement.shard_master else ""
        )

    def gradients(
        self,
        *,
        accumulation: bool,
        reduced: bool,
        reduce_itemsize: int | None = None,
        accumulate_itemsize: int = 4,
        tier: Tier = Tier.DEVICE,
    ) -> tuple[int, str]:
        """Returns the gradients between backward and step, or between micro-batches.

        Args:
            accumulation: More than one micro-batch per update.
            reduced: Whether the boundary has passed; False: between two micro-batches.
            reduce_itemsize: Bytes per element of what is sent; None is the parameter's.
            accumulate_itemsize: Bytes per element of a sum over micro-batches (``grad_accum_dtype``). Sums over ranks
                are fp32 unless they are added to a sum over micro-batches, whose dtype they take.
            tier: Where; unreduced gradients are on the device.
        """
        total, text = 0, "bytes x Psi"
        for bucket, placed in self._trained():
            unreduced = not reduced and not self.placement.shard_gradients and bucket.num_slices > 1
            if (Tier.DEVICE if unreduced else placed.gradient_tier) is not tier:
                continue
            if bucket.num_slices == 1 and not accumulation:
                total += (reduce_itemsize or itemsize(bucket.dtype)) * bucket.numel
                continue
            over_micro_batches = unreduced or bucket.num_slices == 1 or self.placement.shard_gradients
            wide = accumulate_itemsize if over_micro_batches else 4
            if self.placement.narrow_masters:
                wide = max(accumulate_itemsize, itemsize(bucket.dtype))
            whole = unreduced or not self.placement.shard_master
            total += (8 if bucket.dtype == "float64" else wide) * (bucket.numel if whole else self.owned_numel(bucket))
            text = f"{wide} x Psi" if whole else f"{wide} x Psi / {self.owners}"
        return total, text
