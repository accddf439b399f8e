"""The first values of an engine's bucket, wherever the parameters' values are now.

A parameter that ``deepspeed.initialize`` finds is either whole on every rank, and then rank 0's values count, or
sharded already: by ``zero.Init``, or by an engine that had the model before. Only the parts that change their owner
travel, all of a bucket in one round, and no rank ever holds more of a sharded bucket than its slice.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from deepspeed.comm.transports.transport import Piece, Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.access.gathered import GatheredBlock
from deepspeed.zero.gather.sharded_parameter import ShardedParameter
from deepspeed.zero.group import BucketGroup
from deepspeed.zero.holder import Address, address_of
from deepspeed.zero.tiling.assemble import assemble, scatter
from deepspeed.zero.tiling.intervals import moves
from deepspeed.zero.tiling.layout import BucketLayout


def first_values(
    layout: BucketLayout,
    params: Sequence[torch.nn.Parameter],
    *,
    group: BucketGroup,
    device: torch.device,
    default_dtype: torch.dtype,
    cut: bool,
) -> torch.Tensor:
    """Brings the values of a bucket together; every rank of the group must call it.

    Args:
        layout: Of the bucket to fill.
        params: Its parameters, in layout order.
        group: The ranks that share the bucket.
        device: Where the result shall be.
        default_dtype: For a bucket without parameters.
        cut: Whether this rank needs its slice only, or everything.

    Returns:
        1-D, this rank's slice or the whole buffer, in the narrowest dtype that holds all values that the parameters
        have now (masters are made from it); padding is zero.

    Raises:
        DeepSpeedConfigError: ``zero.Init`` has sharded a parameter in another group.
    """
    dtypes = [p.dtype for p in params] or [default_dtype]
    dtype = functools.reduce(torch.promote_types, dtypes)  # neither of fp16 and bf16 holds the other's values
    transport = group.gather
    flat = torch.zeros(layout.slice_numel if cut else layout.numel, dtype=dtype, device=device)
    round_ = _Slice(layout, flat, transport) if cut else _Whole(layout, flat, transport)
    for tile, parameter in enumerate(params):
        address = address_of(parameter)
        if address is not None and isinstance(parameter, ShardedParameter):
            if address.holder.transport.ranks == transport.ranks:
                round_.from_parts(tile, address)
                continue
            if address.holder.group.name != group.name:
                raise DeepSpeedConfigError(
                    f"{layout.tiles[tile].name!r} belongs to the group {group.name!r}, but zero.Init has shared it as "
                    f"one of {address.holder.group.name!r}, so that all groups have the same values of it; build its "
                    f"module inside `with deepspeed.zero.tiling.describe.in_group({group.name!r})`"
                )
            values = _gathered_elsewhere(parameter, address).to(device)
        else:
            values = parameter.detach().to(device)
        round_.from_rank_0(tile, values.to(dtype).reshape(-1))
    round_.travel()
    return flat


def _gathered_elsewhere(parameter: torch.nn.Parameter, address: Address) -> torch.Tensor:
    """All values of a parameter that other ranks share than those of the engine."""
    block = GatheredBlock([(parameter, address)], None)
    block.open()
    values = parameter.detach().clone()
    block.give_back(restore=False)
    return values


class _Round:
    """The values of one bucket on their way into ``flat``: planned tile by tile, moved at once."""

    def __init__(self, layout: BucketLayout, flat: torch.Tensor, transport: Transport) -> None:
        self.layout = layout
        self.flat = flat
        self.transport = transport
        self.rank = transport.rank
        self.parcels: list[Piece] = []
        self.arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []  # (place, values) to copy when the round is over

    def travel(self) -> None:
        """Moves what was planned."""
        tiles = self.layout.tiles
        self.transport.move(self.parcels, label=f"the first values of {tiles[0].name if tiles else 'an empty bucket'}")
        for place, values in self.arrivals:
            if place.data_ptr() != values.data_ptr():
                place.copy_(values)

    def landing_for(self, place: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Where values of ``dtype`` arrive that belong into ``place``."""
        return place if dtype == place.dtype else torch.empty_like(place, dtype=dtype)


class _Slice(_Round):
    """``flat`` is this rank's slice."""

    def from_parts(self, tile: int, address: Address) -> None:
        """Sharded before, sharded after: intervals that change their owner."""
        holder, flat = address.holder, self.flat
        for move in moves(holder.layout.fragments_of(address.tile), self.layout.fragments_of(tile)):
            place = source = None
            if move.target == self.rank:
                place = flat[move.target_start : move.target_start + move.numel]
            if move.source == self.rank:
                source = holder.shard[move.source_start : move.source_start + move.numel].to(flat.device)
            if move.source == move.target:
                if place is not None and source is not None:
                    self.arrivals.append((place, source))
                continue
            tensor = source
            if place is not None:
                tensor = self.landing_for(place, holder.dtype)
                self.arrivals.append((place, tensor))
            self.parcels.append(Piece(move.source, move.target, tensor))

    def from_rank_0(self, tile: int, values: torch.Tensor) -> None:
        """Whole before, sharded after."""
        fragment = self.layout.fragment(tile, self.rank)
        place = None if fragment is None else self.flat[fragment.in_slice]
        if self.rank == 0 and fragment is not None and place is not None:
            self.arrivals.append((place, values[fragment.in_tile]))
        self.parcels += scatter(self.layout, tile, self.rank, 0, values, place)


class _Whole(_Round):
    """``flat`` is the whole buffer."""

    def _place(self, tile: int) -> torch.Tensor:
        start = self.layout.starts[tile]
        return self.flat[start : start + self.layout.tiles[tile].numel]

    def from_parts(self, tile: int, address: Address) -> None:
        """Sharded before, on every rank after."""
        holder, place = address.holder, self._place(tile)
        whole = self.landing_for(place, holder.dtype)
        fragment = holder.fragment(address.tile)
        mine = None if fragment is None else holder.shard[fragment.in_slice]
        self.parcels += assemble(holder.layout, address.tile, self.rank, mine, whole)
        self.arrivals.append((place, whole))

    def from_rank_0(self, tile: int, values: torch.Tensor) -> None:
        """Whole before, on every rank after."""
        place = self._place(tile)
        if self.rank == 0:
            place.copy_(values)
        self.parcels.append(Piece(0, None, place))
