"""The sums of one bucket's gradients since the last update.

Up to three sums wait for the update: *local* (this rank's own micro-batches, the whole bucket), *partial* (over the
ranks that share slices; not yet over those with the same slices) and *reduced* (over all ranks: what the
update reads). With one micro-batch there is only *reduced*. A :class:`GradientSumState` taken when a backward begins
shows later which sums the backward was added to, and what remains when it is undone.
A :class:`GradientDestination` brings a reduced gradient to where the update reads it, and adds further ones there.

:func:`squared_norm` gives the same number on every layout, stage and world size. A buffer is read as blocks of
64 elements, which no layout ever cuts. Each block's norm is taken in fp32, or in fp64 where gradients are fp64; its
square is exact in fp64 (of an fp32 norm), and the squares are added there. The order of the fp64 sum moves the result
by about 1e-16, which :func:`norm_from_squares` rounds away by ending in fp32, so that clipping
(:func:`gradient_factor`) cannot tell two layouts apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import FlatBuffer, MemoryTracker, StorageKind
from deepspeed.zero.tiling.layout import BLOCK, BucketLayout

#: Elements that fit the cache: whole blocks of 64.
CHUNK = 1 << 18

_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
_CHUNK_BLOCKS = 4096  # 1 MiB of fp32: the cast copy of a 16-bit buffer stays in cache


@dataclass(frozen=True)
class GradientSumState:
    """Holds the state of a gradient sum at one moment."""

    is_empty: bool  # whether there was no sum
    has_local: bool  # whether there was a local sum
    additions: int  # number of backwards whose addition had started
    used: tuple[bool, ...]  # per parameter, whether a gradient had arrived since the last update


class GradientSum:
    """The sums of one bucket."""

    def __init__(
        self,
        packed: FlatBuffer,
        starts: tuple[int, ...],
        shapes: list[tuple[int, ...]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        destination: GradientDestination,
        memory_tracker: MemoryTracker,
    ) -> None:
        self._packed = packed
        self._tiles = starts, shapes
        # the dtype of sums over micro-batches; sums over ranks are kept in it where each micro-batch is reduced
        self.dtype = dtype
        self._device = device
        self._destination = destination
        self._memory_tracker = memory_tracker
        self.local: FlatBuffer | None = None  # 1-D, the whole bucket, or None
        self.partial: FlatBuffer | None = None  # 1-D, aligned with the slice of this rank or with the bucket, or None
        # as ``partial``; it may lie in the buffer into which gradients are packed
        self.reduced: FlatBuffer | None = None
        self.used = [False] * len(starts)  # per parameter, whether a gradient arrived since the last update
        self.squares: Squares | None = None  # sum of squares of ``reduced``, if it was computed with it; else None
        # whether the update follows, so that squares are computed while gradients are in cache
        self.takes_squares = False
        self._additions = 0
        self._cut: tuple[FlatBuffer, list[torch.Tensor]] | None = None  # a local sum, and each parameter's part of it

    # -- present state -----------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Returns whether there is no sum."""
        return self.local is None and self.partial is None and self.reduced is None

    @property
    def is_packed(self) -> bool:
        """Returns whether the reduced gradient lies in the buffer into which gradients are packed (a group of one)."""
        return self.reduced is self._packed

    def mark(self) -> GradientSumState:
        """Returns the present state."""
        return GradientSumState(self.is_empty, self.local is not None, self._additions, tuple(self.used))

    def has_grown_since(self, mark: GradientSumState) -> bool:
        """Returns whether the addition of a backward has started since ``mark``; its end depends on the peers."""
        return self._additions > mark.additions

    def is_mixed_since(self, mark: GradientSumState, *, reduced: bool) -> bool:
        """Returns whether a backward has been added to a sum that was there before it."""
        had = not mark.is_empty if reduced else mark.has_local
        return had and self.has_grown_since(mark)

    # -- adding ------------------------------------------------------------------------------------------------------

    def begin_addition(self) -> None:
        """Counts an addition that starts now."""
        self._additions += 1

    def fresh_squares(self, *, wanted: bool = True) -> Squares | None:
        """Drops the squares; returns new ones to be filled if ``wanted`` and :attr:`takes_squares`."""
        self.squares = Squares(self._device) if self.takes_squares and wanted else None
        return self.squares

    def add_local(self, *, is_result: bool) -> None:
        """Adds the packed gradient to the local sum and frees it.

        Args:
            is_result: Whether the update reads the local sum, since no other rank's is added.
        """
        self.begin_addition()
        if self.local is None:
            self.local = self.new_buffer(self._packed.tensor.numel(), self.dtype)
            self.local.tensor.copy_(self._packed.tensor)
        else:
            add_into(self.local.tensor, self._packed.tensor, self.fresh_squares(wanted=is_result))
        self._packed.free()

    def add_apart(self, grads: dict[int, torch.Tensor]) -> None:
        """Adds unpacked gradients to the local sum.

        Args:
            grads: By the place of the parameter in the bucket, in the parameter's shape; those left out are zero.
        """
        self.begin_addition()
        self.squares = None
        is_first = self.local is None
        if self.local is None:
            self.local = self.new_buffer(self._packed.tensor.numel(), self.dtype)
            if sum(grad.numel() for grad in grads.values()) < self.local.tensor.numel():
                self.local.tensor.zero_()
        if self._cut is None or self._cut[0] is not self.local:
            self._cut = self.local, self.local.views(*self._tiles)
        targets = [self._cut[1][index] for index in grads]
        # they have a graph after backward(create_graph=True)
        added = [grad.detach() if grad.requires_grad else grad for grad in grads.values()]
        if added:
            (torch._foreach_copy_ if is_first else torch._foreach_add_)(targets, added)

    def take_local(self) -> FlatBuffer:
        """Returns the local sum and hands over its ownership."""
        assert self.local is not None
        taken, self.local, self._cut = self.local, None, None
        return taken

    def add_partial(self, incoming: FlatBuffer) -> None:
        """Adds a sum over the ranks that share slices."""
        if self.partial is None:
            self.partial = incoming
        else:
            self.partial.tensor.add_(incoming.tensor)
            incoming.free()

    def take_partial(self) -> FlatBuffer:
        """Returns the partial sum and hands over its ownership."""
        assert self.partial is not None
        taken, self.partial = self.partial, None
        return taken

    def add_reduced(self, incoming: FlatBuffer, *, narrows: bool = False) -> None:
        """Adds a sum over all ranks to what the update will read.

        Args:
            incoming: The sum, owned by this object from now on. The first one keeps its squares.
            narrows: Round a first one to :attr:`dtype`.
        """
        if self.reduced is None:
            # If that is the packed buffer, leave_packed moves the sum before the next pack.
            if narrows:
                narrow = self.new_buffer(incoming.tensor.numel(), self.dtype, self._destination.incoming_tier)
                narrow.tensor.copy_(incoming.tensor)
                incoming.free()
                incoming = narrow
            self.reduced = self._destination.to_destination(incoming)
        else:
            self.squares = Squares(self.reduced.tensor.device) if self.takes_squares else None
            self.reduced = self._destination.add(self.reduced, incoming, self.dtype, self.squares)

    def leave_packed(self) -> None:
        """Moves a reduced gradient out of the packed buffer when another backward needs it."""
        if self.is_packed:
            self.reduced = self.new_buffer(self._packed.tensor.numel(), self.dtype)
            self.reduced.tensor.copy_(self._packed.tensor)

    def new_buffer(self, numel: int, dtype: torch.dtype, tier: Tier = Tier.DEVICE) -> FlatBuffer:
        """Allocates memory for gradients and counts it."""
        return FlatBuffer(
            numel, dtype, self._device, kind=StorageKind.GRADIENT, memory_tracker=self._memory_tracker, tier=tier
        )

    # -- the update's side -------------------------------------------------------------------------------------------

    def read(self) -> torch.Tensor | None:
        """Returns the reduced gradient, or None."""
        if self.reduced is None:
            return None
        self._destination.wait(self.reduced)
        return self.reduced.tensor

    def of_squares(self) -> torch.Tensor | None:
        """Returns the sum of squares of the reduced gradient, 0-dim fp64 where that is; None without one.

        The gradient is read only if its squares were not computed with it. Does not block the host.
        """
        result = self.read()
        if result is None:
            return None
        return squared_norm(result) if self.squares is None else self.squares.total

    def relocate(self, copy: Callable[[torch.Tensor], torch.Tensor], tier: Tier) -> None:
        """Moves the sums, 1-D, to other memory."""

        def moved(old: FlatBuffer) -> FlatBuffer:
            new = FlatBuffer.holding(copy(old.tensor), old, tier)
            old.free()
            return new

        if self.reduced is not None and self._destination.tier is Tier.DEVICE:
            self.reduced = moved(self.reduced)
        if self.local is not None:
            self.local = moved(self.local)
        if self.partial is not None:
            self.partial = moved(self.partial)

    # -- undoing -----------------------------------------------------------------------------------------------------

    def undo_local(self, mark: GradientSumState, *, with_sum: bool) -> None:
        """Removes a backward that began at ``mark`` from the local sum and from the used flags."""
        if self.local is not None and (with_sum or not mark.has_local):
            self.take_local().free()
        self.used = [False] * len(self.used) if self.is_empty else list(mark.used)

    def discard(self) -> None:
        """Does what :meth:`clear` does, but keeps a partial sum, as zeros: other ranks expect it in the second step."""
        partial, self.partial = self.partial, None
        self.clear()
        self.partial = partial
        if partial is not None:
            partial.tensor.zero_()

    def clear(self) -> None:
        """Frees every sum, but not the packed buffer."""
        for buffer in (self.reduced, self.local, self.partial):
            if buffer is not None and buffer is not self._packed:
                buffer.free()
        self.reduced = self.local = self.partial = self.squares = self._cut = None
        self.used = [False] * len(self.used)


def pack_and_square(
    layout: BucketLayout,
    flat: torch.Tensor,
    views: list[torch.Tensor],
    grads: dict[int, torch.Tensor],
    squares: Squares,
) -> None:
    """Copies gradients into ``flat`` part by part, and computes the squares of each part while it is in the cache.

    Args:
        flat: 1-D, the whole buffer; already zero where there is no gradient.
        grads: By index of the tile, in its shape.
    """
    if flat.device.type != "cpu":  # launches would cost more than a pass over device memory
        if grads:
            torch._foreach_copy_([views[index] for index in grads], list(grads.values()))
        squares.add(flat)
        return
    ends = (*layout.starts[1:], layout.numel)
    first = 0
    while first < len(ends):
        last = first
        while last + 1 < len(ends) and ends[last] - layout.starts[first] < CHUNK:
            last += 1
        start, stop = layout.starts[first], ends[last]
        inside = [index for index in range(first, last + 1) if index in grads]
        if inside == [first] and stop - start > CHUNK and grads[first].is_contiguous():
            tile, source = flat[start:stop], grads[first].view(-1)  # larger than the cache; it may end in padding
            for low in range(0, source.numel(), CHUNK):
                part = source[low : low + CHUNK]
                tile[low : low + part.numel()].copy_(part)
                squares.add(tile[low : low + CHUNK])
        elif inside:
            torch._foreach_copy_([views[index] for index in inside], [grads[index] for index in inside])
            squares.add(flat[start:stop])
        first = last + 1


class GradientDestination:
    """Brings reduced gradients to the memory in which the update reads them.

    This class keeps them where they are reduced: on the device, or in host memory if the model computes there.
    ``deepspeed.offload`` has one that copies them from an accelerator to the host.
    """

    def __init__(self, tier: Tier = Tier.DEVICE) -> None:
        self.tier = tier

    @property
    def incoming_tier(self) -> Tier:
        """The tier in which the reduction leaves its result."""
        return self.tier

    def to_destination(self, reduced: FlatBuffer) -> FlatBuffer:
        """Returns the reduced gradient at its destination; takes ownership of ``reduced``."""
        return reduced

    def add(
        self, result: FlatBuffer, reduced: FlatBuffer, dtype: torch.dtype, squares: Squares | None = None
    ) -> FlatBuffer:
        """Returns the sum of a reduced gradient and one at its destination; takes ownership of both.

        Args:
            result: What :meth:`to_destination` or this method returned.
            reduced: The gradient to add.
            dtype: The dtype of the sum.
            squares: Receives the squares of the sum, once :meth:`wait` has returned.
        """
        add_into(result.tensor, reduced.tensor, squares)
        reduced.free()
        return result

    def wait(self, result: FlatBuffer) -> None:
        """Waits until every copy into ``result`` and every addition to it is done."""


def add_into(total: torch.Tensor, part: torch.Tensor, squares: Squares | None) -> None:
    """Adds ``part`` to ``total`` (both 1-D); ``squares`` takes the squares of the sum while it is in the cache."""
    if squares is None:
        total.add_(part)
        return
    chunk = CHUNK if total.device.type == "cpu" else max(total.numel(), 1)
    for one, other in zip(total.split(chunk), part.split(chunk), strict=True):
        squares.add(one.add_(other))


def squared_norm(flat: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squares of a flat buffer.

    Args:
        flat: 1-D, any floating dtype, length a multiple of 64; padding must hold zeros.

    Returns:
        0-dim fp64 tensor on the buffer's device; not finite if any element is not.
    """
    blocks = flat.view(-1, BLOCK)
    if flat.dtype in (torch.float32, torch.float64):
        return torch.linalg.vector_norm(blocks, dim=1).double().square_().sum()
    if flat.device.type != "cpu":
        return torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float32).double().square_().sum()
    norms = [torch.linalg.vector_norm(part.float(), dim=1) for part in blocks.split(_CHUNK_BLOCKS)]
    return torch.cat(norms).double().square_().sum() if norms else flat.new_zeros((), dtype=torch.float64)


class Squares:
    """The sum of squares of a buffer, computed part by part while each is in the cache."""

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, part: torch.Tensor) -> None:
        """Adds a part: 1-D, whole blocks of 64 elements."""
        self._total += squared_norm(part)

    @property
    def total(self) -> torch.Tensor:
        """The sum so far: 0-dim fp64, on the buffer's device."""
        return self._total


def norm_from_squares(total: float) -> float:
    """Returns the norm, rounded to fp32 so that it does not depend on the order of the sum; nan and inf pass."""
    if not math.isfinite(total):
        return total
    return torch.tensor(math.sqrt(total), dtype=torch.float32).item()


def clip_factor(norm: float, limit: float) -> float:
    """Returns the factor on gradients of norm ``norm`` that leaves a norm of at most ``limit`` (0: any)."""
    return min(1.0, limit / (norm + _CLIP_EPSILON)) if limit > 0 else 1.0


def gradient_factor(norm: float, *, scale: float, clip_grad: float) -> float | None:
    """Returns what the update multiplies gradients by; None for exactly 1."""
    factor = 1.0 / scale * clip_factor(norm, clip_grad)
    return None if factor == 1.0 else factor
