"""Error feedback: keeps what a bucket's reductions lose of a rank's gradients and adds it to the next ones.

Reductions run before the ranks know whether a gradient of this update overflows: only the agreement before the update
shows it. If an update may be skipped, a copy of the errors from before its first reduction is kept, so that a skipped
update can restore them.
"""

from __future__ import annotations

import torch

from deepspeed.comm.base.codec import Residual
from deepspeed.zero.storage import FlatBuffer, MemoryTracker, StorageKind
from deepspeed.zero.tiling.layout import BucketLayout


def feedback_numel(layout: BucketLayout, *, to_owner: bool, spread: bool = False) -> int:
    """Returns the elements of the error that a rank keeps of the reductions of a bucket.

    Args:
        to_owner: The owner of a slice gets its sum; otherwise every rank gets the whole sum, and the owner also keeps
            what is lost of the slice that it sends on.
        spread: Sums of slices over the ranks with the same ones are cut among these, too; else all of them get them.
    """
    numel = layout.numel if to_owner else layout.numel + layout.slice_numel
    if layout.replicas > 1:
        numel += layout.slice_numel + (0 if spread else layout.slice_numel // layout.replicas)
    return numel


class ErrorFeedback:
    """The errors of one rank and one bucket, scaled by the loss scale as gradients are.

    Attributes:
        tensor: All errors, 1-D fp32.
        reduction: Views of those of the sum over the ranks that share slices: of what this rank sends and, where all
            get the whole sum, of the slice that it sends on.
        combination: The same of the sum of slices over the ranks that hold the same ones; None where no others do.

    Args:
        may_skip: An update may be skipped, which leaves the errors as they were: twice the memory.
    """

    def __init__(
        self,
        layout: BucketLayout,
        device: torch.device,
        memory_tracker: MemoryTracker,
        *,
        to_owner: bool,
        spread: bool,
        may_skip: bool,
    ) -> None:
        numel = feedback_numel(layout, to_owner=to_owner, spread=spread)
        self._buffers = [
            FlatBuffer(numel, torch.float32, device, kind=StorageKind.PRIVATE, memory_tracker=memory_tracker)
            for _ in range(1 + may_skip)
        ]
        self.tensor = rest = self._buffers[0].tensor.zero_()
        self._before = self._buffers[1].tensor if may_skip else None
        self._is_kept = False

        def take(numel: int) -> torch.Tensor:
            nonlocal rest
            taken, rest = rest[:numel], rest[numel:]
            return taken

        part = layout.slice_numel
        self.reduction = Residual(take(layout.numel), None if to_owner else take(part))
        self.combination: Residual | None = None
        if layout.replicas > 1:
            self.combination = Residual(take(part), None if spread else take(part // layout.replicas))

    def begin_reduction(self) -> None:
        """Copies the errors before the first reduction of an update, if it may be skipped."""
        if self._before is not None and not self._is_kept:
            self._before.copy_(self.tensor)
            self._is_kept = True

    def scale(self, factor: float) -> None:
        """Multiplies the errors by ``factor``, as the unit of gradients changes with the loss scale."""
        self.tensor.mul_(factor)
        if self._before is not None and self._is_kept:
            self._before.mul_(factor)

    def commit(self) -> None:
        """Called when the update is applied: what its reductions lost is added to the next gradients."""
        self._is_kept = False

    def restore(self) -> None:
        """Restores the errors when the gradients of the update are discarded; does nothing after a commit."""
        if self._before is not None and self._is_kept:
            self.tensor.copy_(self._before)
            self._is_kept = False
