"""Which part of an update a backward is, said by whoever drives the training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatch:
    """One backward of an update.

    The engine counts calls of ``step``; a schedule that runs forwards and backwards in an order of its own says it.

    Attributes:
        index: Number of the micro-batch in its update, from 0. Several backwards may belong to one: those of the parts
            of a model that is run part by part.
        is_first: No backward of this update came before.
        is_last: The update follows this backward.
    """

    index: int
    is_first: bool
    is_last: bool
