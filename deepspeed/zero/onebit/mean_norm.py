"""The norm of a mean of gradients that no rank has: from random sums of few numbers, which can be exchanged.

What clips gradients must know the norm of their mean. Where each rank's gradient stays its own, nobody can compute it,
and neither substitute is near: the ranks' own norms are larger by up to the root of the number of ranks, as noise does
not cancel in them, and what comes out of a codec is mostly the codec's error where momentum travels, of which a new
gradient is a tenth. So elements get random signs and are added up in :data:`BINS` numbers, the same way on all ranks
(a count sketch). That is linear: the mean of such sums is the sum of the mean, and the expectation of its squared norm
is that of the mean, with a deviation of ``sqrt(2 / BINS)`` of it, 2 %, or none where there are no more elements than
bins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed.comm.codecs.codec import CHUNK, DEVICE_ELEMENTS
from deepspeed.comm.codecs.table import unpack_signs
from deepspeed.zero.group import BucketGroup

BINS = 4096
"""Numbers that stand for a gradient, fp32; a divisor of ``CHUNK`` and of ``DEVICE_ELEMENTS``."""


class Sketch:
    """The random sums of this rank's gradients of one group.

    Args:
        group: Whose.
        seed: Of the signs; equal on all ranks, and another one at every update.
    """

    def __init__(self, group: BucketGroup, seed: int) -> None:
        self.group = group
        self._seed = seed
        self._numel = 0
        self._sums = torch.zeros(BINS)

    def add(self, numel: int, gradient: torch.Tensor | None, factor: float) -> None:
        """Adds a buffer; every rank of the group must add those of equal lengths in the same order.

        Args:
            numel: Its length.
            gradient: 1-D, floating; None: zeros.
            factor: Multiplier of it.
        """
        place, self._numel = self._numel, self._numel + numel
        if gradient is None:
            return
        random = torch.Generator(gradient.device).manual_seed(self._seed * 1_000_003 + place)
        sums = torch.zeros(BINS, device=gradient.device)
        at_once = CHUNK if gradient.device.type == "cpu" else DEVICE_ELEMENTS
        for start in range(0, numel, at_once):
            part = gradient[start : start + at_once]
            length = -(-part.numel() // BINS) * BINS
            bits = torch.randint(0, 256, (length // 8,), dtype=torch.uint8, device=part.device, generator=random)
            signed = torch.zeros(length, device=part.device)
            signed[: part.numel()].copy_(part)
            signed = torch.where(unpack_signs(bits), signed, -signed)
            sums += signed.view(-1, BINS).sum(0)
        self._sums += sums.cpu().mul_(factor).roll(place)  # so that few elements meet no others

    def squares(self) -> float:
        """What this rank adds to the job's sum of squares of the mean; every rank of the group must call it."""
        rows = self.group.reduce.gather_small(self._sums, channel="step", label="the norm of the mean gradient")
        if not self.group.counts or self.group.place != 0:
            return 0.0
        return rows.double().mean(0).square_().sum().item()


def sketches(entries: Sequence[tuple[BucketGroup, int, torch.Tensor | None, float]], seed: int) -> list[Sketch]:
    """One for each group.

    Args:
        entries: The buckets' groups, and what :meth:`Sketch.add` takes, in an order that all ranks have.
        seed: As of :class:`Sketch`.
    """
    found: dict[int, Sketch] = {}
    for group, numel, gradient, factor in entries:
        sketch = found.setdefault(id(group), Sketch(group, seed))
        sketch.add(numel, gradient, factor)
    return list(found.values())
