"""The ranks of a job along named axes, in the form that pipeline programs know; a view of a mesh without processes."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

from deepspeed.axes import DATA, PIPE, TENSOR
from deepspeed.comm.job.mesh import Mesh

MODEL = "model"
"""What topologies call the tensor axis."""


class ProcessTopology:
    """Ranks as points of a grid, row by row: the last axis is the fastest.

    Args:
        axes: Names, slowest first.
        dims: Size of each.

    Attributes:
        axes: As given.
        dims: As given.
        mapping: Coordinate (a named tuple with the axes as fields) to rank.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise ValueError(
                f"{type(self).__name__}(axes={list(axes)}, dims={list(dims)}): expected one size of at least 1 for "
                "each name, and different names"
            )
        self.axes = list(axes)
        self.dims = list(dims)
        coordinate: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]  # noqa: PYI024
        self.ProcessCoord = coordinate
        places = product(*(range(dim) for dim in self.dims))
        self.mapping = {coordinate._make(place): rank for rank, place in enumerate(places)}

    def __str__(self) -> str:
        """Returns every coordinate with its rank."""
        return str(self.mapping)

    def get_rank(self, **coordinate: int) -> int:
        """Returns the rank at a coordinate.

        Args:
            **coordinate: A place for every axis.

        Raises:
            ValueError: An axis is missing, or there is one too many.
            AssertionError: The axes have no such place.
        """
        if len(coordinate) != len(self.axes):
            raise ValueError(f"get_rank: expected a coordinate on each of {self.axes}, found {coordinate}")
        key = self.ProcessCoord(**coordinate)
        assert key in self.mapping, (
            f"get_rank: {coordinate} is no place of {dict(zip(self.axes, self.dims, strict=True))}"
        )
        return self.mapping[key]

    def get_axis_names(self) -> list[str]:
        """Returns the axes, slowest first."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = (DATA, PIPE),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Returns the place of a rank in words, as it appears in file names: ``model_01``.

        Args:
            rank: The rank.
            omit_axes: Axes that are left out.
            inner_sep: Between name and place, which has two digits at least.
            outer_sep: Between axes.
        """
        place = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Returns the size of an axis; 0 if there is none of that name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Returns the coordinate of a rank.

        Raises:
            ValueError: There is no such rank.
        """
        for place, number in self.mapping.items():
            if number == rank:
                return place
        raise ValueError(f"get_coord: there is no rank {rank}, only 0 to {self.world_size() - 1}")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Returns the ranks that differ along ``axis`` only, list by list; empty if there is no such axis."""
        if axis not in self.axes:
            return []
        lists: dict[tuple[int, ...], list[int]] = {}
        at = self.axes.index(axis)
        for place, rank in self.mapping.items():
            lists.setdefault(place[:at] + place[at + 1 :], []).append(rank)
        return list(lists.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Returns the ranks whose places on the named axes are the given ones, ascending."""
        return [
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == at for axis, at in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Returns the ranks at place ``idx`` of ``axis``, ascending."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Ranks of all axes together."""
        return len(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages and copies of the model; the ranks of one stage are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__([PIPE, DATA], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, copies of the model, and the ranks that share layers, which are neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__([PIPE, DATA, MODEL], [num_pp, num_dp, num_mp])


def mesh_of_topology(topology: ProcessTopology) -> Mesh:
    """Returns the mesh of the same ranks, under the names of this package."""
    return Mesh(
        tuple((TENSOR if axis == MODEL else axis, dim) for axis, dim in zip(topology.axes, topology.dims, strict=True))
    )


def usual_topology(world_size: int) -> PipeDataParallelTopology:
    """Returns the prime factors of the number of ranks, assigned in turn to stages and copies."""
    sizes, rest, factor, turn = [1, 1], world_size, 2, 0
    while rest > 1:
        while rest % factor == 0:
            sizes[turn] *= factor
            rest //= factor
            turn = 1 - turn
        factor += 1
    return PipeDataParallelTopology(num_pp=sizes[0], num_dp=sizes[1])
