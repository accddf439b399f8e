"""Which ranks share experts, and which hold the same ones: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deepspeed.comm.job.mesh import DATA, EXPERT, SEQUENCE, Mesh
from deepspeed.errors import DeepSpeedConfigError


class ExpertRanks(NamedTuple):
    """The ranks of a job as layers of one expert-parallel size see them.

    Attributes:
        sharing: Lists of the ranks that share the experts of a layer, in the order of the experts.
        same: Lists of the ranks that hold the same experts.
    """

    sharing: tuple[tuple[int, ...], ...]
    same: tuple[tuple[int, ...], ...]


def cut(dense: Sequence[Sequence[int]], ep_size: int, *, data_first: bool = False) -> ExpertRanks:
    """Cuts ranks that hold the same part of the rest of the model into such that share experts.

    Args:
        dense: Lists of ranks, each of which holds the same part of the model and sees other samples.
        ep_size: How many share the experts.
        data_first: Ranks that share experts are as far from each other as can be, instead of neighbours.

    Raises:
        DeepSpeedConfigError: ``ep_size`` does not divide the number of these ranks.
    """
    sharing: list[tuple[int, ...]] = []
    same: list[tuple[int, ...]] = []
    for ranks in dense:
        if len(ranks) % ep_size:
            raise DeepSpeedConfigError(
                f"ep_size {ep_size}: the {len(ranks)} ranks that see different samples cannot be cut into groups of "
                f"{ep_size} that share experts; choose a divisor of {len(ranks)}"
            )
        copies = len(ranks) // ep_size
        near = [tuple(ranks[first : first + ep_size]) for first in range(0, len(ranks), ep_size)]
        far = [tuple(ranks[first::copies]) for first in range(copies)]
        chosen = far if data_first else near
        sharing += chosen
        same += [tuple(members[place] for members in chosen) for place in range(ep_size)]
    return ExpertRanks(tuple(sharing), tuple(same))


def along_mesh(mesh: Mesh, ep_size: int, *, data_first: bool = False) -> ExpertRanks:
    """The same on a mesh: along its expert axis where that has ``ep_size`` ranks, else cut out of its data ranks."""
    if mesh.size(EXPERT) == ep_size > 1 and not data_first:
        others = (name for name in mesh.names if name in (DATA, SEQUENCE))
        return ExpertRanks(tuple(map(tuple, mesh.groups(EXPERT))), tuple(map(tuple, mesh.groups(*others))))
    dense = mesh.groups(*(name for name in mesh.names if name in (DATA, EXPERT, SEQUENCE)))
    return cut(dense, ep_size, data_first=data_first)
