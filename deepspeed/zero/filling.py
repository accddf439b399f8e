"""The first values of an engine's bucket, wherever the parameters' values are now.

A parameter that ``deepspeed.initialize`` finds is either whole on every rank, and then rank 0's values count, or
sharded already: by ``zero.Init``, or by an engine that had the model before. Only the parts that change their owner
travel, all of a bucket in one round, and no rank ever holds more of a sharded bucket than its slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed.comm.transport import Piece, Transport
from deepspeed.zero.gathered import GatheredBlock
from deepspeed.zero.holder import Address, address_of
from deepspeed.zero.intervals import moves, part_of, tile_parts
from deepspeed.zero.layout import BucketLayout
from deepspeed.zero.sharded_parameter import ShardedParameter

Arrival = tuple[torch.Tensor, torch.Tensor]
"""``(place, values)``: what to copy once the round is over."""


def first_values(
    layout: BucketLayout,
    params: Sequence[torch.nn.Parameter],
    *,
    transport: Transport,
    device: torch.device,
    default_dtype: torch.dtype,
    cut: bool,
) -> torch.Tensor:
    """Brings the values of a bucket together; every rank of the group must call it.

    Args:
        layout: Of the bucket to fill.
        params: Its parameters, in layout order.
        transport: Of the group.
        device: Where the result shall be.
        default_dtype: For a bucket without parameters.
        cut: Whether this rank needs its slice only, or everything.

    Returns:
        1-D, this rank's slice or the whole buffer, in the widest dtype that the parameters have now (masters are made
        from it); padding is zero.
    """
    dtype = max((p.dtype for p in params), key=lambda d: d.itemsize, default=default_dtype)
    flat = torch.zeros(layout.slice_numel if cut else layout.numel, dtype=dtype, device=device)
    pieces: list[Piece] = []
    arrivals: list[Arrival] = []
    for tile, parameter in enumerate(params):
        address = address_of(parameter)
        if address is not None and isinstance(parameter, ShardedParameter):
            if address.holder.transport.ranks == transport.ranks:
                plan = _from_parts if cut else _whole_from_parts
                plan(address, layout, tile, flat, transport, pieces, arrivals)
                continue
            values = _gathered_elsewhere(parameter, address).to(device)
        else:
            values = parameter.detach().to(device)
        plan_whole = _from_rank_0 if cut else _whole_from_rank_0
        plan_whole(values.to(dtype).reshape(-1), layout, tile, flat, transport, pieces, arrivals)
    transport.move(pieces, label=f"the first values of {layout.tiles[0].name if layout.tiles else 'an empty bucket'}")
    for place, values in arrivals:
        if place.data_ptr() != values.data_ptr():
            place.copy_(values)
    return flat


def _gathered_elsewhere(parameter: torch.nn.Parameter, address: Address) -> torch.Tensor:
    """All values of a parameter that other ranks share than those of the engine."""
    block = GatheredBlock(address.holder.transport, [(parameter, address)], None)
    block.open()
    values = parameter.detach().clone()
    block.give_back(restore=False)
    return values


def _mine(layout: BucketLayout, tile: int, flat: torch.Tensor) -> torch.Tensor:
    """The place of a tile in the whole buffer."""
    start = layout.starts[tile]
    return flat[start : start + layout.tiles[tile].numel]


def _from_parts(
    address: Address,
    layout: BucketLayout,
    tile: int,
    flat: torch.Tensor,
    transport: Transport,
    pieces: list[Piece],
    arrivals: list[Arrival],
) -> None:
    """Sharded before, sharded after: intervals that change their owner."""
    holder, rank = address.holder, transport.rank
    for move in moves(tile_parts(holder.layout, address.tile), tile_parts(layout, tile)):
        place = source = None
        if move.target == rank:
            place = flat[move.target_start : move.target_start + move.numel]
        if move.source == rank:
            source = holder.shard[move.source_start : move.source_start + move.numel].to(flat.device)
        if move.source == move.target:
            if place is not None and source is not None:
                arrivals.append((place, source))
            continue
        tensor = source
        if place is not None:
            tensor = place if holder.dtype == flat.dtype else torch.empty_like(place, dtype=holder.dtype)
            arrivals.append((place, tensor))
        pieces.append(Piece(move.source, move.target, tensor))


def _whole_from_parts(
    address: Address,
    layout: BucketLayout,
    tile: int,
    flat: torch.Tensor,
    transport: Transport,
    pieces: list[Piece],
    arrivals: list[Arrival],
) -> None:
    """Sharded before, on every rank after."""
    holder, place = address.holder, _mine(layout, tile, flat)
    whole = place if holder.dtype == flat.dtype else torch.empty_like(place, dtype=holder.dtype)
    for part in tile_parts(holder.layout, address.tile):
        target = whole[part.tile_start : part.tile_stop]
        if part.rank == transport.rank:
            target.copy_(holder.read_part(part))
        pieces.append(Piece(part.rank, None, target))
    arrivals.append((place, whole))


def _from_rank_0(
    values: torch.Tensor,
    layout: BucketLayout,
    tile: int,
    flat: torch.Tensor,
    transport: Transport,
    pieces: list[Piece],
    arrivals: list[Arrival],
) -> None:
    """Whole before, sharded after. Ranks that only receive need not look at the parts of others."""
    mine = part_of(layout, tile, transport.rank)
    for part in tile_parts(layout, tile) if transport.rank == 0 else [mine] if mine is not None else []:
        piece = values[part.tile_start : part.tile_stop]
        place = flat[part.slice_start : part.slice_start + part.numel] if part.rank == transport.rank else None
        if part.rank == 0:
            if place is not None:
                arrivals.append((place, piece))
            continue
        pieces.append(Piece(0, part.rank, piece if transport.rank == 0 else place))


def _whole_from_rank_0(
    values: torch.Tensor,
    layout: BucketLayout,
    tile: int,
    flat: torch.Tensor,
    transport: Transport,
    pieces: list[Piece],
    arrivals: list[Arrival],
) -> None:
    """Whole before, on every rank after."""
    place = _mine(layout, tile, flat)
    if transport.rank == 0:
        place.copy_(values)
    pieces.append(Piece(0, None, place))
