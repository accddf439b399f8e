"""Which part of an update a backward is, said by whoever drives the training."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Part:
    """A part of the model that is run by itself, such as a chunk of a pipeline.

    Attributes:
        reaches: Parameters that a backward of it may reach.
        closes: Those of them that no later backward of this update reaches: their gradients are reduced now.
        reduces_each: The gradients of the others are reduced now too, instead of being summed up on this rank.
    """

    reaches: frozenset[torch.nn.Parameter]
    closes: frozenset[torch.nn.Parameter] = frozenset()
    reduces_each: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """One backward of an update.

    The engine counts calls of ``step``; a schedule that runs forwards and backwards in an order of its own says it.

    Attributes:
        index: Number of the micro-batch in its update, from 0. Several backwards may belong to one: those of the parts
            of a model that is run part by part.
        is_first: No backward of this update came before.
        is_last: The update follows this backward.
        part: What of the model it is a backward of; None: all of it.
    """

    index: int
    is_first: bool
    is_last: bool
    part: Part | None = None
