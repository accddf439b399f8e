"""Finds which part of a logical parameter a parameter is: from its mark, or from placements on a mesh.

A layer that holds a part marks its parameter (:func:`say_part`) before ``zero.Init`` or an engine takes it. A
parameter without such a mark is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.comm.transports.transport import TensorTransfer, Transport
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.zero.tiling.tiles import Tile, TilePart, TileRegion

_MARK = "ds_tile_part"
_OWNERS = "ds_part_owners"
_NAME = "ds_logical_name"


@dataclass(frozen=True)
class PartOwners:
    """The ranks that each have a part of one logical parameter."""

    transport: Transport  # transport between them; they must use it in one order
    parts: tuple[TilePart, ...]  # Part of each rank, by its position among them. Ranks with equal parts hold copies.

    @property
    def mine(self) -> TilePart:
        """This rank's part."""
        return self.parts[self.transport.rank]

    def whole(self, tile: torch.Tensor, label: str) -> torch.Tensor:
        """Gathers the parts of a parameter, or of a state of the same shape. All ranks that hold a part must call it.

        Args:
            tile: This rank's part, in the shape of its tile.

        Returns:
            The whole tensor, in the parameter's full shape.
        """
        packed = torch.cat([tile[region.in_tile].reshape(-1) for region in self.mine.regions] or [tile.new_empty(0)])
        gathered = [
            packed if place == self.transport.rank else packed.new_empty(sum(region.numel for region in part.regions))
            for place, part in enumerate(self.parts)
        ]
        self.transport.move([TensorTransfer(place, None, values) for place, values in enumerate(gathered)], label=label)
        whole = tile.new_zeros(self.mine.global_shape)
        for part, values in zip(self.parts, gathered, strict=True):
            start = 0
            for region in part.regions:
                whole[region.in_whole] = values[start : start + region.numel].view(region.shape)
                start += region.numel
        return whole

    def tile_of(self, whole: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns this rank's tile of a whole value; padding is zero.

        Args:
            whole: In the shape of the logical parameter.
        """
        tile = whole.new_zeros(shape)
        for region in self.mine.regions:
            tile[region.in_tile] = whole[region.in_whole]
        return tile


def mark_owners(parameter: torch.Tensor, owners: PartOwners) -> None:
    """Records on a parameter (any shape) which ranks have its other parts, so that accessors can return all of it."""
    setattr(parameter, _OWNERS, owners)


def part_owners_of(parameter: torch.Tensor) -> PartOwners | None:
    """Returns the ranks with the other parts of a parameter (any shape); None if that was not declared."""
    return parameter.__dict__.get(_OWNERS)


def set_logical_name(module: nn.Module, name: str) -> None:
    """Records the name of a module in the whole model, where its name on this rank is another (experts on ranks)."""
    setattr(module, _NAME, name)


def logical_name_of(module: nn.Module) -> str | None:
    """Returns what :func:`set_logical_name` recorded, or None."""
    name: str | None = getattr(module, _NAME, None)
    return name


def say_part(parameter: torch.Tensor, part: TilePart) -> None:
    """Records which part of a logical parameter ``parameter`` is; ranks with equal parts hold copies of one shape."""
    setattr(parameter, _MARK, part)


def has_part(parameter: torch.Tensor) -> bool:
    """Returns whether a parameter (any shape) is marked as a part."""
    return hasattr(parameter, _MARK)


def tile_of(name: str, shape: tuple[int, ...], param_group: int, parameter: torch.Tensor) -> Tile:
    """Returns the tile of a parameter.

    Args:
        shape: Shape of all that this rank's model has of it.
        parameter: Read for its mark, which tells the part.

    Raises:
        DeepSpeedConfigError: Its part does not fit its shape.
    """
    try:
        return Tile(name, shape, param_group, getattr(parameter, _MARK, None))
    except ValueError as error:
        raise DeepSpeedConfigError(f"say_part: {error}") from None


def part_of_placements(
    name: str,
    global_shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
) -> TilePart:
    """Returns the part that a rank has of a ``DTensor``.

    Along each axis of the mesh, in order, the rank's part so far is cut as by ``torch.chunk``: into chunks of equal
    length, of which the last ones may be shorter or empty.

    Args:
        mesh: Ranks along each axis.
        coordinate: The rank's place on each axis.
        placements: For each axis a ``Shard`` or ``Replicate``.

    Raises:
        NotYetSupportedError: A placement is of another kind.
    """
    first, extents = [0] * len(global_shape), list(global_shape)
    for size, place, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or hasattr(placement, "split_factor"):
            raise NotYetSupportedError(
                f"the parameter {name!r} is placed as {placement}; expected Shard or Replicate along every axis. "
                "Redistribute it so before initialize"
            )
        dim = placement.dim % len(global_shape)
        chunk = -(-extents[dim] // size)
        low = min(place * chunk, extents[dim])
        first[dim] += low
        extents[dim] = min(chunk, extents[dim] - low)
    regions = () if 0 in extents else (TileRegion(tuple(first), (0,) * len(extents), tuple(extents)),)
    return TilePart(name, tuple(global_shape), regions)
