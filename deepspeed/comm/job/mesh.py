"""The ranks of a job along named axes: pure arithmetic, without torch and without processes.

``deepspeed/axes.py`` describes each axis. The last axis is the fastest: its ranks are neighbors, most often on
one node, so the axis with most communication comes last.

A program that numbers its ranks otherwise (an ``mpu``, a torch ``DeviceMesh``) gives the ranks in the order of the
mesh. Callers of coordinates and groups need not handle that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from deepspeed.axes import AXES, DATA
from deepspeed.errors import DeepSpeedConfigError


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes over the ranks ``0 .. N - 1`` of a job.

    Raises:
        DeepSpeedConfigError: A name occurs twice, a size is below 1, or ``ranks`` are not ``0 .. N - 1``.
    """

    # ``(name, size)`` of each axis, slowest first. A size of 1 is allowed, an axis that is not named has it.
    axes: tuple[tuple[str, int], ...] = ()
    # The ranks in the order of the mesh; empty: ``0 .. N - 1``, as is usual.
    ranks: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise DeepSpeedConfigError(
                f"a mesh needs different names for its axes, found {', '.join(names)}; rename one of them"
            )
        small = [f"{name} {size}" for name, size in self.axes if size < 1]
        if small:
            raise DeepSpeedConfigError(
                f"an axis of a mesh has at least 1 rank, found {', '.join(small)}; give it 1 or more"
            )
        if self.ranks and self.ranks == tuple(range(self.world_size)):
            object.__setattr__(self, "ranks", ())  # normalized, so that equal meshes compare equal
        if self.ranks and sorted(self.ranks) != list(range(self.world_size)):
            raise DeepSpeedConfigError(
                f"the {self} has {self.world_size} places for the ranks 0 to {self.world_size - 1}, each once; found "
                f"{len(self.ranks)}: {_shown(self.ranks)}. Name every rank once"
            )

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size by name, slowest first."""
        return dict(self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, slowest first."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def world_size(self) -> int:
        """Ranks of the job."""
        return math.prod(size for _, size in self.axes)

    def __str__(self) -> str:
        """Returns the sizes in words: ``mesh of pipe 2 x data 4``."""
        return f"mesh of {' x '.join(f'{name} {size}' for name, size in self.axes) or '1 rank'}"

    def check(self, world_size: int) -> Mesh:
        """Returns the mesh itself; raises unless it is one of ``world_size`` ranks.

        Raises:
            DeepSpeedConfigError: It has another number of them.
        """
        if self.world_size != world_size:
            raise DeepSpeedConfigError(
                f"the {self} has {self.world_size} ranks, but the job has {world_size}; choose sizes whose product is "
                f"{world_size}, or start {self.world_size} ranks"
            )
        return self

    def size(self, *axes: str) -> int:
        """Returns the number of ranks of a group along ``axes``; 1 for an axis that the mesh does not name."""
        return math.prod(self.sizes.get(name, 1) for name in axes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Returns the place of ``rank`` on every axis.

        Raises:
            DeepSpeedConfigError: There is no such rank.
        """
        rest = self._place(rank)
        found = []
        for name, size in reversed(self.axes):
            rest, place = divmod(rest, size)
            found.append((name, place))
        return dict(reversed(found))

    def rank_at(self, coordinate: Mapping[str, int]) -> int:
        """Returns the rank with this place on every axis; 0 on those that ``coordinate`` leaves out.

        Raises:
            DeepSpeedConfigError: The mesh has no such place.
        """
        place = 0
        for name, size in self.axes:
            place = place * size + coordinate.get(name, 0)
        if any(not 0 <= at < self.size(name) for name, at in coordinate.items()):
            raise DeepSpeedConfigError(f"the {self} has no place {dict(coordinate)}")
        return self.ranks[place] if self.ranks else place

    def position(self, rank: int, *axes: str) -> int:
        """Returns the number of ``rank`` in its group along ``axes``, the last one fastest."""
        known = self._positions.get((rank, axes))
        if known is None:
            coordinate, known = self.coordinate(rank), 0
            for name in axes:
                known = known * self.size(name) + coordinate.get(name, 0)
            self._positions[rank, axes] = known
        return known

    def group(self, rank: int, *axes: str) -> list[int]:
        """Returns the ranks that differ from ``rank`` along ``axes`` only, itself included, in ascending position."""
        known = self._groups.get((rank, axes))
        if known is None:
            own = [name for name in axes if name in self.sizes]
            coordinate, strides = self.coordinate(rank), self._strides
            places = [self._place(rank) - sum(coordinate[name] * strides[name] for name in own)]
            for name in own:
                steps = range(0, self.sizes[name] * strides[name], strides[name])
                places = [start + step for start in places for step in steps]
            known = tuple(self.ranks[place] for place in places) if self.ranks else tuple(places)
            self._groups[rank, axes] = known
        return list(known)

    def groups(self, *axes: str) -> list[list[int]]:
        """Returns all groups along ``axes``, ordered by the coordinates of their ranks: every rank is in exactly one.

        The members of each are in the order of their positions; where ``axes`` are named in the order of the mesh and
        ranks are numbered as usual, that is ascending.
        """
        others = self.others(*axes)
        return [self.group(self.rank_at(place), *axes) for place in self._places(others)]

    def others(self, *axes: str) -> tuple[str, ...]:
        """Returns the axes that are not among ``axes``."""
        return tuple(name for name in self.names if name not in axes)

    def split(self, axis: str, outer: str, inner: tuple[str, int]) -> Mesh:
        """Returns the same ranks with ``axis`` cut into ``outer`` and, faster, ``inner`` (name and size): neighbors.

        Raises:
            DeepSpeedConfigError: The size of ``axis`` is not a multiple of the inner one.
        """
        name, size = inner
        whole = self.size(axis)
        if size < 1 or whole % size:
            raise DeepSpeedConfigError(
                f"axis {axis!r} of {whole} ranks cannot be cut into {name!r} groups of {size}; choose a divisor of "
                f"{whole}"
            )
        parts = {axis: ((outer, whole // size), inner)}
        named = self.axes if axis in self.sizes else (*self.axes, (axis, 1))
        return Mesh(tuple(part for entry in named for part in parts.get(entry[0], (entry,))), self.ranks)

    def _place(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise DeepSpeedConfigError(f"the {self} has no rank {rank}; choose one of 0 to {self.world_size - 1}")
        return self._place_of_rank[rank] if self.ranks else rank

    # A cache: pipelines look up every rank in every step.

    @cached_property
    def _positions(self) -> dict[tuple[int, tuple[str, ...]], int]:
        return {}

    @cached_property
    def _groups(self) -> dict[tuple[int, tuple[str, ...]], tuple[int, ...]]:
        return {}

    @cached_property
    def _strides(self) -> dict[str, int]:
        """Returns the stride of each axis: the distance in ranks between neighbors along it."""
        found, stride = {}, 1
        for name, size in reversed(self.axes):
            found[name] = stride
            stride *= size
        return found

    @cached_property
    def _place_of_rank(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def _places(self, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        """Yields every coordinate along ``axes``, the last axis fastest."""
        for number in range(self.size(*axes)):
            rest, place = number, {}
            for name in reversed(axes):
                rest, at = divmod(rest, self.size(name))
                if name in self.sizes:
                    place[name] = at
            yield place


def data_mesh(world_size: int) -> Mesh:
    """Returns the mesh of a purely data-parallel job."""
    return Mesh(((DATA, world_size),))


def mesh_of_places(places: Sequence[Mapping[str, int]], source: str) -> Mesh:
    """Returns the mesh in which every rank has the place that it reports.

    The axes are put in the order in which ranks are numbered as usual, if there is one; else in that of ``AXES``. All
    ``places``, which are by rank, name the same axes; ``source`` is where they come from, for messages.

    Raises:
        DeepSpeedConfigError: The places are not those of a mesh: one is taken twice or not at all.
    """
    sizes = {name: 1 + max(place[name] for place in places) for name in places[0]}
    # Of two axes, the one whose first step leads further away in ranks is the slower one.
    first = {name: next((rank for rank, place in enumerate(places) if place[name]), 0) for name in sizes}
    by_steps = sorted(sizes, key=lambda name: (-first[name], _usual_place(name)))
    usual = sorted(sizes, key=_usual_place)
    for order in (by_steps, usual):
        mesh = Mesh(tuple((name, sizes[name]) for name in order))
        if mesh.world_size != len(places):
            break
        ranks: dict[int, int] = {}
        for rank, place in enumerate(places):
            ranks.setdefault(mesh.rank_at(place), rank)
        if len(ranks) < len(places):
            break
        mesh = Mesh(mesh.axes, tuple(ranks[number] for number in range(len(places))))
        if not mesh.ranks or order is usual:
            return mesh
    shown = "; ".join(f"rank {rank}: {dict(place)}" for rank, place in enumerate(places[:8]))
    sized = ", ".join(f"{name} {size}" for name, size in sizes.items())
    raise DeepSpeedConfigError(
        f"{source} does not lay the {len(places)} ranks out as a mesh: the sizes of its groups make "
        f"{math.prod(sizes.values())} places ({sized}), and every rank needs one of its own. They are {shown}"
        f"{'; ...' if len(places) > 8 else ''}. Check the ranks and sizes that it returns"
    )


def _usual_place(axis: str) -> int:
    return AXES.index(axis) if axis in AXES else len(AXES)


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
