"""Topology and grid of a pipeline's ranks, under the names that pipeline programs import."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

from deepspeed.axes import DATA, PIPE, TENSOR
from deepspeed.comm.job import groups
from deepspeed.comm.job.job import rank_in, size_of
from deepspeed.comm.job.mesh import Mesh
from deepspeed.errors import DeepSpeedConfigError

MODEL = "model"
"""Name of the tensor axis in topologies."""


class ProcessTopology:
    """Ranks as points of a grid in row-major order: the last axis is the fastest.

    Raises:
        ValueError: Names occur twice, or are not as many as the sizes.
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
        # coordinate (a named tuple with the axes as fields) to rank
        self.mapping = {coordinate._make(place): rank for rank, place in enumerate(places)}

    def __str__(self) -> str:
        """Returns every coordinate with its rank."""
        return str(self.mapping)

    def get_rank(self, **coordinate: int) -> int:
        """Returns the rank at a coordinate, a place for every axis.

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
        """Returns the place of a rank in words, as it appears in file names: ``model_01``, with two digits at least."""
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
        """Returns the number of ranks of all axes together."""
        return len(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages and copies of the model; the ranks of one stage are neighbors."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__([PIPE, DATA], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, copies of the model, and the ranks that share layers, which are neighbors."""

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


class PipelineParallelGrid:
    """The ranks of a job as stages, copies of the model and tensor ranks. Every rank of the job must make it.

    *Model* means stages and tensor ranks together here: all ranks that hold parts of one copy. The ranks that cut the
    same layers are the *slice*. Without a topology the prime factors of the number of ranks are assigned to stages and
    copies. ``process_group`` must be that of all ranks, or None.

    Raises:
        DeepSpeedConfigError: ``process_group`` does not have all ranks of the job.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank, self.world_size = rank_in(), size_of()
        if process_group is not None and size_of(process_group) != self.world_size:
            raise DeepSpeedConfigError(
                f"PipelineParallelGrid(process_group=...): it has {size_of(process_group)} ranks, the job "
                f"{self.world_size}; a pipeline is laid over all ranks, so leave process_group out"
            )
        self._topo = topology if topology is not None else usual_topology(self.world_size)
        self.mesh: Mesh = mesh_of_topology(self._topo).check(self.world_size)
        groups.set_mesh(self.mesh)
        mesh, rank = self.mesh, self.global_rank
        # Copies of the model, stages, and ranks that share a layer; then this rank's place among the first two.
        self.data_parallel_size, self.pipe_parallel_size = mesh.size(DATA), mesh.size(PIPE)
        self.model_parallel_size = self.slice_parallel_size = mesh.size(TENSOR)
        self.stage_id, self.data_parallel_id = mesh.position(rank, PIPE), mesh.position(rank, DATA)
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1

        # The ranks of every group along an axis, and this rank's. ``model_groups`` share layers; it may be empty.
        self.dp_groups, self.dp_group = mesh.groups(DATA), mesh.group(rank, DATA)
        self.pipe_groups, self.pp_group = mesh.groups(PIPE), mesh.group(rank, PIPE)
        self.model_groups = mesh.groups(TENSOR) if self.slice_parallel_size > 1 else []
        self.slice_group = mesh.group(rank, TENSOR)
        # Every rank with the rank of the next stage; the last stage with the first.
        pipes = (mesh.group(one, PIPE) for one in range(self.world_size))
        self.p2p_groups = [[one, pipe[(pipe.index(one) + 1) % len(pipe)]] for one, pipe in enumerate(pipes)]
        with_a_group = ((DATA,), (PIPE,), (TENSOR,), (PIPE, TENSOR))
        self._proc_groups = {axes: groups.group_along(*axes) for axes in with_a_group if mesh.size(*axes) > 1}
        # This rank's place among all ranks with parts of its copy, and their number.
        self.ds_model_rank, self.ds_model_world_size = mesh.position(rank, PIPE, TENSOR), mesh.size(PIPE, TENSOR)

    def _proc_group(self, *axes: str) -> Any:
        return self._proc_groups[axes] if axes in self._proc_groups else groups.group_of_one()

    @property
    def dp_proc_group(self) -> Any:
        """The torch process group of the ranks with the same layers."""
        return self._proc_group(DATA)

    @property
    def pp_proc_group(self) -> Any:
        """The torch process group of this rank's pipeline."""
        return self._proc_group(PIPE)

    @property
    def slice_proc_group(self) -> Any:
        """The torch process group of the ranks that share this rank's layers."""
        return self._proc_group(TENSOR)

    @property
    def ds_model_proc_group(self) -> Any:
        """The torch process group of all ranks with parts of this rank's copy."""
        return self._proc_group(PIPE, TENSOR)

    def topology(self) -> ProcessTopology:
        """Returns how the ranks are laid out."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Returns the rank of a stage, at these places on other axes; on those left out, at this rank's."""
        place = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        return self._topo.get_rank(**place._asdict())

    def get_global_rank(self) -> int:
        """Returns the number of this rank among all."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """Returns this rank's stage."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """Returns this rank's copy of the model."""
        return self.data_parallel_id

    def get_pipe_parallel_rank(self) -> int:
        """Returns this rank's stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Returns the number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """Returns the torch process group of this rank's pipeline."""
        return self.pp_proc_group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_data_parallel_rank(self) -> int:
        """Returns this rank's copy of the model."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Copies of the model."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """Returns the torch process group of the ranks with the same layers."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Returns those ranks."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """Returns this rank's place among those with parts of its copy: stages and tensor ranks."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """Returns the number of ranks with parts of one copy."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """Returns their torch process group."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """Returns this rank's place among those that share its layers."""
        return self.mesh.position(self.global_rank, TENSOR)

    def get_slice_parallel_world_size(self) -> int:
        """Returns the number of ranks that share a layer."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """Returns their torch process group."""
        return self.slice_proc_group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
