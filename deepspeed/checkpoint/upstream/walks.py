"""From flat partitions to parameters: where every element of a parameter lies. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from deepspeed.errors import CheckpointError

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Extent:
    """Elements ``[start, start + numel)`` of a flattened parameter, in one rank's flat tensor.

    Attributes:
        start: First element in the parameter.
        numel: Length.
        rank: Whose tensor.
        offset: Where it begins there.
    """

    start: int
    numel: int
    rank: int
    offset: int


def stage_1_and_2(
    shapes: Shapes, lengths: Sequence[int], gaps: Sequence[int] | None, where: str
) -> dict[str, list[Extent]]:
    """Locates the parameters of a group that lie end to end over all ranks; a rank may end anywhere in a parameter.

    Args:
        shapes: Parameters in flat order.
        lengths: Elements of each rank's tensor.
        gaps: Elements left free after each parameter, or None.
        where: For messages.

    Raises:
        CheckpointError: The tensors are shorter than the parameters, or longer than padding explains.
    """
    ranks = len(lengths)
    starts = [sum(lengths[:rank]) for rank in range(ranks)]
    found: dict[str, list[Extent]] = {}
    position = 0
    for index, (name, shape) in enumerate(shapes.items()):
        numel = prod(shape)
        extents = []
        for rank in range(ranks):
            first, last = max(position, starts[rank]), min(position + numel, starts[rank] + lengths[rank])
            if first < last:
                extents.append(Extent(first - position, last - first, rank, first - starts[rank]))
        if sum(extent.numel for extent in extents) != numel:
            raise CheckpointError(f"{where}: the flat tensors of {ranks} ranks end before {name!r}; files are missing")
        found[name] = extents
        position += numel + (gaps[index] if gaps else 0)
    surplus = sum(lengths) - position
    if surplus > 2 * ranks + sum(gaps or ()):
        raise CheckpointError(
            f"{where}: the flat tensors have {surplus} elements more than the parameters, which is no padding; the "
            "layout is not understood"
        )
    return found


def stage_3(shapes: Shapes, lengths: Sequence[int], where: str) -> dict[str, list[Extent]]:
    """Locates the parameters of a sub-group of which every rank holds equal pieces.

    Args:
        shapes: Parameters in order.
        lengths: Elements of each rank's tensor.
        where: For messages.

    Raises:
        CheckpointError: The walk does not end where the tensors do.
    """
    ranks = len(lengths)
    found: dict[str, list[Extent]] = {}
    offset = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        piece = -(-numel // ranks)
        found[name] = [
            Extent(rank * piece, min(piece, numel - rank * piece), rank, offset)
            for rank in range(ranks)
            if rank * piece < numel
        ]
        offset += piece
    if any(length != offset for length in lengths):
        raise CheckpointError(
            f"{where}: the ranks' flat tensors have {sorted(set(lengths))} elements, the parameters need {offset}; "
            "files are missing or the layout is not understood"
        )
    return found
