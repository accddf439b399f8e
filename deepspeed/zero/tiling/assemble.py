"""Gathers tiles from the ranks that share them, and scatters a tile from one rank to these.

Both functions only plan the transfers; the caller runs those of many tiles in one round.
"""

from __future__ import annotations

import torch

from deepspeed.comm.transports.transport import TensorTransfer
from deepspeed.zero.tiling.layout import BucketLayout


def assemble(
    layout: BucketLayout, tile: int, rank: int, mine: torch.Tensor | None, out: torch.Tensor
) -> list[TensorTransfer]:
    """Returns the transfers that gather a tile's fragments on every rank.

    Args:
        mine: 1-D, this rank's fragment, copied at once; may be None or empty where it has none.
        out: 1-D and contiguous, on every rank: the place of the whole flattened tile.
    """
    transfers = []
    for fragment in layout.fragments_of(tile):
        place = out[fragment.in_tile]
        if fragment.rank == rank:
            assert mine is not None
            place.copy_(mine)
        transfers.append(TensorTransfer(fragment.rank, None, place))
    return transfers


def scatter(
    layout: BucketLayout, tile: int, rank: int, source: int, values: torch.Tensor | None, place: torch.Tensor | None
) -> list[TensorTransfer]:
    """Returns the transfers of a tile's fragments from the one rank that has all of it.

    The caller copies that rank's own.

    Args:
        source: The rank that has the tile.
        values: 1-D, the whole flattened tile; read on ``source`` only.
        place: 1-D, where this rank's fragment goes; None where it has none.
    """
    if rank != source:
        return [] if place is None or place.numel() == 0 else [TensorTransfer(source, rank, place)]
    assert values is not None
    others = (fragment for fragment in layout.fragments_of(tile) if fragment.rank != source)
    return [TensorTransfer(source, fragment.rank, values[fragment.in_tile]) for fragment in others]
