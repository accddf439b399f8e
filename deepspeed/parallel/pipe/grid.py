"""Where a rank stands in a pipeline job, under the names that pipeline programs ask for: a view of the job's mesh."""

from __future__ import annotations

from typing import Any

from deepspeed.axes import DATA, PIPE, TENSOR
from deepspeed.comm.job import groups
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.job.world import rank_in, size_of
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.pipe.topology import ProcessTopology, mesh_of_topology, usual_topology


class PipelineParallelGrid:
    """The ranks of a job as stages, copies of the model and tensor ranks. Every rank of the job must make it.

    *Model* means stages and tensor ranks together here: all ranks that hold parts of one copy. The ranks that cut the
    same layers are the *slice*.

    Args:
        topology: How the ranks are laid out; None: the prime factors of their number, assigned to stages and copies.
        process_group: Must be that of all ranks, or None.

    Attributes:
        mesh: The job's.
        global_rank: This rank.
        world_size: All ranks.
        data_parallel_size: Copies of the model.
        pipe_parallel_size: Stages.
        model_parallel_size: Ranks that share a layer.
        slice_parallel_size: The same.
        stage_id: This rank's stage.
        data_parallel_id: Its copy of the model.
        is_first_stage: Whether it has the first layers.
        is_last_stage: Whether it has the last ones.
        dp_groups: The ranks of every group along the data axis.
        dp_group: This rank's.
        pipe_groups: The ranks of every pipeline.
        pp_group: This rank's.
        model_groups: The ranks of every group that shares layers; empty where none do.
        slice_group: This rank's.
        ds_model_rank: Its place among all ranks with parts of this rank's copy.
        ds_model_world_size: Their number.
        p2p_groups: Every rank with the rank of the next stage; the last stage with the first.
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
        self.data_parallel_size, self.pipe_parallel_size = mesh.size(DATA), mesh.size(PIPE)
        self.model_parallel_size = self.slice_parallel_size = mesh.size(TENSOR)
        self.stage_id, self.data_parallel_id = mesh.position(rank, PIPE), mesh.position(rank, DATA)
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1

        self.dp_groups, self.dp_group = mesh.groups(DATA), mesh.group(rank, DATA)
        self.pipe_groups, self.pp_group = mesh.groups(PIPE), mesh.group(rank, PIPE)
        self.model_groups = mesh.groups(TENSOR) if self.slice_parallel_size > 1 else []
        self.slice_group = mesh.group(rank, TENSOR)
        self.p2p_groups = [self._with_successor(one) for one in range(self.world_size)]
        with_a_group = ((DATA,), (PIPE,), (TENSOR,), (PIPE, TENSOR))
        self._proc_groups = {axes: groups.group_along(*axes) for axes in with_a_group if mesh.size(*axes) > 1}
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

    def _with_successor(self, rank: int) -> list[int]:
        stages = self.mesh.group(rank, PIPE)
        return [rank, stages[(stages.index(rank) + 1) % len(stages)]]

    def topology(self) -> ProcessTopology:
        """Returns how the ranks are laid out."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Returns the rank of a stage.

        Args:
            stage_id: The stage.
            **kwargs: Its places on other axes; on those left out, this rank's.
        """
        place = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        return self._topo.get_rank(**place._asdict())

    def get_global_rank(self) -> int:
        """Returns the number of this rank among all."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """This rank's stage."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """This rank's copy of the model."""
        return self.data_parallel_id

    def get_pipe_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """Returns the torch process group of this rank's pipeline."""
        return self.pp_proc_group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_data_parallel_rank(self) -> int:
        """This rank's copy of the model."""
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
        """This rank's place among those with parts of its copy: stages and tensor ranks."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """Ranks with parts of one copy."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """Their torch process group."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """This rank's place among those that share its layers."""
        return self.mesh.position(self.global_rank, TENSOR)

    def get_slice_parallel_world_size(self) -> int:
        """Ranks that share a layer."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """Their torch process group."""
        return self.slice_proc_group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
