"""How a reduced gradient comes to lie where the update reads it, and how further ones are added to it there."""

from __future__ import annotations

import torch

from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import FlatBuffer
from deepspeed.zero.update.norm import Squares

#: Elements that are worked on while they are in the cache: whole blocks of 64.
CHUNK = 1 << 18


class GradientDestination:
    """Brings reduced gradients to the memory in which the update reads them.

    This class serves gradients that are reduced right there: on the device, and in host memory where that is what the
    model computes in. ``deepspeed.offload`` has the one that copies them down from an accelerator.

    Args:
        tier: The memory, for the books.
    """

    def __init__(self, tier: Tier = Tier.DEVICE) -> None:
        self.tier = tier

    @property
    def incoming_tier(self) -> Tier:
        """Where the reduction itself leaves its result."""
        return self.tier

    def to_destination(self, reduced: FlatBuffer) -> FlatBuffer:
        """Returns the reduced gradient in its memory; ``reduced`` is given up."""
        return reduced

    def add(
        self, result: FlatBuffer, reduced: FlatBuffer, dtype: torch.dtype, squares: Squares | None = None
    ) -> FlatBuffer:
        """Adds a reduced gradient to one that has landed; both are given up.

        Args:
            result: What :meth:`to_destination` or this method returned.
            reduced: What is added.
            dtype: Of the sum.
            squares: Receives the squares of the sum, once :meth:`wait` has returned.

        Returns:
            The sum.
        """
        add_into(result.tensor, reduced.tensor, squares)
        reduced.free()
        return result

    def wait(self, result: FlatBuffer) -> None:
        """Returns when ``result`` holds everything that was landed in it or added to it."""


def add_into(total: torch.Tensor, part: torch.Tensor, squares: Squares | None) -> None:
    """Adds ``part`` to ``total`` (both 1-D); ``squares`` takes the squares of the sum while it is in the cache."""
    if squares is None:
        total.add_(part)
        return
    chunk = CHUNK if total.device.type == "cpu" else max(total.numel(), 1)
    for one, other in zip(total.split(chunk), part.split(chunk), strict=True):
        squares.add(one.add_(other))
