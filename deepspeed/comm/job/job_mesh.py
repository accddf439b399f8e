"""Determines the job's mesh and this rank's coordinates on it.

Four sources can determine it: the program's ``mpu``, ``mesh_param``, a model that is already cut (a pipeline), and the
configuration. Axes from objects take precedence; further axes from the configuration divide the data-parallel ranks,
the axis of all remaining ranks.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from deepspeed.axes import (
    AXES,
    DATA,
    EXPERT,
    KEYS,
    OTHER_PARTS,
    PARTS_OF_LAYERS,
    PARTS_OF_SAMPLES,
    ROWS,
    SAME_PART,
    SAMPLES,
    SEQUENCE,
    TENSOR,
)
from deepspeed.comm.job import groups
from deepspeed.comm.job.job import rank_in, size_of
from deepspeed.comm.job.mesh import Mesh, data_mesh
from deepspeed.comm.job.mesh_sources import (
    mesh_of_config,
    mesh_of_dtensors,
    mesh_of_mpu,
    mesh_of_param,
    ranks_of_dtensors,
)
from deepspeed.comm.job.mpu import RankCoordinates, coordinates, knows_its_place
from deepspeed.config.degrees import data_parallel_size, degrees
from deepspeed.config.sections.root import Root
from deepspeed.errors import DeepSpeedConfigError


class JobMesh:
    """The job's mesh according to the program's objects, before the configuration is read. Every rank must make it.

    A model that is cut already has a :class:`~deepspeed.comm.job.mesh.Mesh` as its attribute ``mesh``; so may an mpu
    have. Of other models, parameters that are ``DTensor`` objects have the ranks over which they are cut.

    Raises:
        DeepSpeedConfigError: They form no mesh, or contradict each other.
    """

    def __init__(self, mpu: Any, mesh_param: Any, model: Any, timeout: timedelta) -> None:
        sources: dict[str, Mesh] = {}
        if isinstance(found := getattr(model, "mesh", None), Mesh):
            sources["the model"] = found.check(size_of())
        if mesh_param is not None:
            sources["mesh_param"] = mesh_of_param(mesh_param)
        self._of_mpu: RankCoordinates | None = None
        self._mpu = mpu
        if isinstance(found := getattr(mpu, "mesh", None), Mesh):
            sources["the mpu"] = found.check(size_of())
        elif mpu is not None:
            self._of_mpu = coordinates(mpu)
            sources["the mpu"] = _mesh_of_groups(mpu, self._of_mpu, timeout)
        cut_over = ranks_of_dtensors(model)
        # the model has parameters that are ``DTensor`` objects, or had until an engine took them
        self.has_dtensors = cut_over is not None
        if cut_over is not None and not sources:
            sources["the model"] = mesh_of_dtensors(cut_over)
        if len(set(sources.values())) > 1:
            listed = "; ".join(f"{who}: {mesh}" for who, mesh in sources.items())
            raise DeepSpeedConfigError(f"initialize: the ranks are laid out in different ways ({listed}); give one")
        self._source = next(iter(sources), "")
        self._given = sources.get(self._source)
        _check_names(self._source, self._given)
        requested = self._of_mpu
        # Torch process group of the ranks on it. None: all; an mpu may cover some ranks only.
        self.decides_together = requested.zero_group if requested is not None and requested.model_size == 1 else None
        self._timeout = timeout

    @property
    def is_ours(self) -> bool:
        """Whether it is set by no unit of the program's own: that one's program cuts its sequences itself."""
        return self._of_mpu is None

    def data_size(self, root: Root) -> int:
        """Returns the number of ranks that share the batch, for the batch arithmetic. Nothing is communicated.

        Raises:
            DeepSpeedConfigError: The degrees of the configuration do not fit the ranks, or what objects carry.
        """
        if self._given is None:
            return data_parallel_size(root, size_of())
        return self.mesh(root).size(*SAMPLES)

    def mesh(self, root: Root) -> Mesh:
        """Returns the mesh of the job. Nothing is communicated.

        Raises:
            DeepSpeedConfigError: Sizes of axes in the configuration do not fit the mesh that the program gave.
        """
        if self._given is None:
            return mesh_of_config(root, size_of())
        found = self._given
        for axis, size in reversed(degrees(root).items()):  # the axis that is cut off first becomes the fastest one
            if size == 1 or found.size(axis) == size:
                continue
            if self._of_mpu is not None or found.size(axis) > 1:
                raise DeepSpeedConfigError(
                    f"{KEYS[axis]} {size}, but {self._source} gives {found}, with {found.size(axis)} along "
                    f"{axis!r}; leave the key out, or make them agree"
                )
            if axis == EXPERT and found.size(DATA) % size and found.size(DATA) * found.size(SEQUENCE) % size == 0:
                continue  # experts are spread over data x sequence ranks, which no axis of this mesh is
            if found.size(DATA) % size:
                raise DeepSpeedConfigError(
                    f"{KEYS[axis]} {size}: expected a divisor of the {found.size(DATA)} data-parallel rank(s) of the "
                    f"{found}, from {self._source}. Choose another size, or give {self._source} more "
                    "data-parallel ranks"
                )
            # Cut out of the data-parallel ranks: neighbors among them, so that no rank changes its other coordinates.
            others = tuple(entry for entry in found.axes if entry[0] != axis)
            found = Mesh(others, found.ranks).split(DATA, DATA, (axis, size))
        return found

    def settle(self, root: Root) -> RankCoordinates:
        """Registers the mesh for ``utils.groups`` and logs this rank's coordinates. Every rank must call it.

        Where all ranks are data-parallel nothing is registered, so that a second model of a process (a teacher, a
        reference) does not undo what the first one registered.

        Raises:
            DeepSpeedConfigError: Sizes of axes in the configuration do not fit the mesh that the program gave.
            DivergenceError: Some rank does something else.
            CommunicationError: Some rank has ended or did not arrive.
        """
        mesh = self.mesh(root)
        if self._mpu is not None:
            groups.set_mpu(self._mpu)
        if self._of_mpu is not None:
            if mesh.size(TENSOR) > 1 and root.tensor_parallel.autotp_size > 1:
                groups.set_mesh(mesh, self._timeout)  # layers that are cut here need groups along axes
            return replace(self._of_mpu, mesh=mesh)
        if mesh.size(DATA) == mesh.world_size:
            return coordinates(None)
        groups.set_mesh(mesh, self._timeout)
        return _coordinates_on(mesh)


def _check_names(source: str, given: Mesh | None) -> None:
    unknown = [name for name, size in given.axes if name not in AXES and size > 1] if given is not None else []
    if unknown:
        short = ", ".join(row.aliases[0] for row in ROWS if row.aliases)
        raise DeepSpeedConfigError(
            f"initialize: {source} is a {given}: expected axes among {', '.join(AXES)} (a DeviceMesh may use {short}), "
            f"found {', '.join(map(repr, unknown))}. Rename them"
        )


def _mesh_of_groups(mpu: Any, requested: RankCoordinates, timeout: timedelta) -> Mesh:
    if requested.zero_size == size_of() == requested.data_size:
        return data_mesh(requested.data_size)
    if requested.zero_size * requested.model_size == size_of() and knows_its_place(mpu):
        return mesh_of_mpu(mpu, timeout)
    # The ranks of the mpu; others may belong to other jobs under one launcher.
    return Mesh(((DATA, requested.data_size), (SEQUENCE, requested.sequence_size)))


def _coordinates_on(mesh: Mesh) -> RankCoordinates:
    """Returns this rank's coordinates on the registered mesh."""
    zero_size, data_size = mesh.size(*SAME_PART), mesh.size(*SAMPLES)
    zero_group = groups.group_along(*SAME_PART)
    rank = rank_in()
    return RankCoordinates(
        # None is the group of all ranks
        zero_group=None if zero_size == mesh.world_size else zero_group,
        data_group=None if data_size == mesh.world_size else groups.group_along(*SAMPLES),
        zero_size=zero_size,
        zero_rank=rank_in(zero_group),
        data_size=data_size,
        data_rank=mesh.position(rank, *SAMPLES),
        sequence_size=mesh.size(*PARTS_OF_SAMPLES),
        sequence_group=groups.group_along(*PARTS_OF_SAMPLES) if mesh.size(*PARTS_OF_SAMPLES) > 1 else None,
        model_size=mesh.size(*OTHER_PARTS),
        tensor_rank=mesh.position(rank, *PARTS_OF_LAYERS),
        mesh=mesh,
    )
