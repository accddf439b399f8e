"""The registry of parallel groups: a purely data-parallel world, and one that an mpu describes."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deepspeed.axes import AXES
from deepspeed.comm.job import groups
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.job.mesh_sources import mesh_of_config, mesh_of_device_mesh, mesh_of_mpu
from deepspeed.config import parse
from deepspeed.errors import CallOrderError, DeepSpeedConfigError, DeprecatedException
from tests.harness import on_ranks, run_ranks


def check_data_parallel_world() -> None:
    size, rank = torch_dist.get_world_size(), torch_dist.get_rank()
    groups.initialize()
    for kind in ("data", "sequence_data", "expert_data"):
        assert getattr(groups, f"_get_{kind}_parallel_group")() is torch_dist.group.WORLD
        assert getattr(groups, f"_get_{kind}_parallel_world_size")() == size
        assert getattr(groups, f"_get_{kind}_parallel_rank")() == rank
    for kind in ("model", "sequence", "expert"):
        group = getattr(groups, f"_get_{kind}_parallel_group")()
        tensor = torch.tensor([float(rank)])
        torch_dist.all_reduce(tensor, group=group)
        assert tensor.item() == rank and torch_dist.get_world_size(group) == 1
        assert getattr(groups, f"_get_{kind}_parallel_world_size")() == 1
        assert getattr(groups, f"_get_{kind}_parallel_rank")() == 0
    assert groups.get_data_parallel_world_size() == size
    assert groups.get_tensor_model_parallel_src_rank() == rank
    assert groups._get_broadcast_src_rank() == groups._get_expert_broadcast_src_rank("ep_size_1") == 0


def check_group_of_one_needs_nobody_else() -> int:
    if torch_dist.get_rank() == 0:
        return torch_dist.get_world_size(groups._get_model_parallel_group())
    return 0


def test_group_of_one_needs_nobody_else():
    assert run_ranks(check_group_of_one_needs_nobody_else, 2) == [1, 0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_data_parallel_world(world_size):
    run_ranks(check_data_parallel_world, world_size)


class TwoByOne:
    """Every rank cuts the layers with all others and averages gradients with nobody."""

    def __init__(self) -> None:
        self.model_group = torch_dist.group.WORLD
        self.data_group = [torch_dist.new_group([r]) for r in range(torch_dist.get_world_size())][torch_dist.get_rank()]

    def get_model_parallel_group(self):
        return self.model_group

    def get_model_parallel_rank(self):
        return torch_dist.get_rank()

    def get_model_parallel_world_size(self):
        return torch_dist.get_world_size()

    def get_data_parallel_group(self):
        return self.data_group


@on_ranks(2)
def test_mpu_is_used() -> None:
    size, rank = torch_dist.get_world_size(), torch_dist.get_rank()
    unit = TwoByOne()
    groups.initialize(mpu=unit)
    try:
        assert groups._get_model_parallel_group() is groups.get_tensor_model_parallel_group() is unit.model_group
        assert groups.get_model_parallel_world_size() == size and groups.get_model_parallel_rank() == rank
        assert groups.get_tensor_model_parallel_src_rank() == 0
        assert groups.get_data_parallel_group() is groups._get_sequence_data_parallel_group() is unit.data_group
        # What the mpu does not return follows from what it returns.
        assert groups._get_data_parallel_world_size() == 1 and groups._get_data_parallel_rank() == 0
        assert groups._get_broadcast_src_rank() == rank
    finally:
        groups.set_mpu(None)


class PipelineGrid:
    """What a grid of 2 stages x 2 data-parallel ranks returns; ``stages_first`` chooses which are neighbors."""

    def __init__(self, stages_first: bool) -> None:
        rank = torch_dist.get_rank()
        self.stage, self.data = divmod(rank, 2) if stages_first else (rank % 2, rank // 2)
        rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
        self.data_groups, self.model_groups = (rows, columns) if stages_first else (columns, rows)
        made = {tuple(ranks): torch_dist.new_group(ranks) for ranks in (*rows, *columns)}
        self.data_group = made[tuple(next(ranks for ranks in self.data_groups if rank in ranks))]
        self.model_group = made[tuple(next(ranks for ranks in self.model_groups if rank in ranks))]

    def get_data_parallel_group(self):
        return self.data_group

    def get_data_parallel_rank(self):
        return self.data

    def get_pipe_parallel_rank(self):
        return self.stage

    def get_pipe_parallel_world_size(self):
        return 2

    def get_model_parallel_group(self):
        return self.model_group

    def get_model_parallel_rank(self):
        return self.stage

    def get_model_parallel_world_size(self):
        return 2

    def get_slice_parallel_group(self):
        return groups.group_of_one()

    def get_slice_parallel_rank(self):
        return 0

    def get_slice_parallel_world_size(self):
        return 1


def check_a_grid_is_read() -> list:
    found = []
    for stages_first in (True, False):
        grid = PipelineGrid(stages_first)
        groups.initialize(mpu=grid)
        # Layers are cut by nobody, though the model is spread over two ranks.
        assert groups.get_tensor_model_parallel_world_size() == 1 and groups.get_tensor_model_parallel_rank() == 0
        assert groups.get_tensor_model_parallel_src_rank() == torch_dist.get_rank()
        assert groups._get_model_parallel_world_size() == 2
        assert groups._get_model_parallel_group() is grid.model_group
        mesh = mesh_of_mpu(grid, timedelta(seconds=30))
        assert mesh.groups("data") == grid.data_groups and mesh.groups("pipe", "tensor") == grid.model_groups
        found.append((mesh.names.index("pipe") < mesh.names.index("data"), mesh.ranks))
    return found


def test_a_pipeline_grid():
    assert run_ranks(check_a_grid_is_read, 4) == [[(True, ()), (False, ())]] * 4


@on_ranks(4)
def test_values_of_a_mesh() -> None:
    rank = torch_dist.get_rank()
    groups.set_mesh(Mesh((("data", 2), ("tensor", 2))))
    assert get_process_group_ranks(groups._get_data_parallel_group()) == [rank % 2, rank % 2 + 2]
    assert groups._get_sequence_data_parallel_world_size() == groups._get_expert_data_parallel_world_size() == 2
    assert groups._get_data_parallel_rank() == groups._get_expert_data_parallel_rank() == rank // 2
    assert get_process_group_ranks(groups.get_tensor_model_parallel_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert groups._get_model_parallel_world_size() == groups.get_tensor_model_parallel_world_size() == 2
    assert groups._get_model_parallel_rank() == groups.get_tensor_model_parallel_rank() == rank % 2
    assert groups.get_tensor_model_parallel_src_rank() == rank // 2 * 2
    assert groups._get_sequence_parallel_world_size() == groups._get_expert_parallel_world_size() == 1
    groups.set_mesh(Mesh((("data", 2), ("expert", 2))))
    assert groups._get_data_parallel_group() is torch_dist.group.WORLD
    assert get_process_group_ranks(groups._get_expert_parallel_group("ep_size_2")) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert get_process_group_ranks(groups._get_expert_data_parallel_group("ep_size_2")) == [rank % 2, rank % 2 + 2]
    with pytest.raises(DeepSpeedConfigError, match="has 2 ranks, but the job has 4"):
        groups.set_mesh(Mesh((("data", 2),)))
    groups.set_mesh(None)
    assert groups._get_data_parallel_world_size() == 4 and groups._get_model_parallel_world_size() == 1


def check_a_device_mesh_is_read() -> tuple:
    usual = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    turned = DeviceMesh("cpu", torch.tensor([[1, 0]]), mesh_dim_names=("replicas", "tp"))
    return tuple(mesh_of_device_mesh(each) for each in (usual, turned))


def test_a_device_mesh():
    usual, turned = run_ranks(check_a_device_mesh_is_read, 2)[0]
    assert usual == Mesh((("data", 1), ("tensor", 2)))
    assert turned.groups("tensor") == [[1, 0]] and turned.coordinate(1) == {"replicas": 0, "tensor": 0}


def test_the_configuration_requests_data_parallel_ranks():
    root = parse({"train_micro_batch_size_per_gpu": 1}, dp_world_size=6).root
    mesh = mesh_of_config(root, 6)
    assert mesh.size("data") == mesh.world_size == 6 and mesh.names == AXES


def test_errors_are_sentences():
    with pytest.raises(DeprecatedException, match=r"ep_size=2.*belongs to the layer.*MoE\(\.\.\., ep_size=2\)"):
        groups.initialize(ep_size=2)
    with pytest.raises(CallOrderError, match="init_distributed"):
        groups.initialize()
    with pytest.raises(CallOrderError, match="'ep_size_4' does not exist yet; known are none"):
        groups._get_expert_parallel_world_size("ep_size_4")


def test_expert_ranks_are_those_of_the_documentation():
    near = groups._get_expert_parallel_ranks(8, 1, 2)
    assert near == ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]])
    far = groups._get_expert_parallel_ranks(8, 1, 2, use_data_before_expert_parallel_=True)
    assert far == ([[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]])
    staged = groups._get_expert_parallel_ranks(8, 1, 2, 2)
    assert staged == ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]])
    sharing, same = groups._get_expert_parallel_ranks(16, 2, 4)
    assert sorted(sharing) == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert [0, 8] in same and [2, 10] in same and [7, 15] in same
    for size in (3, 0, -2):
        with pytest.raises(DeepSpeedConfigError, match=f"ep_size {size}: the 8 ranks .* choose a divisor of 8"):
            groups._get_expert_parallel_ranks(8, 1, size)


@on_ranks(4)
def test_expert_groups_by_hand() -> None:
    rank = torch_dist.get_rank()
    assert groups._get_max_expert_size_name() == "ep_size_1"
    assert groups._get_expert_parallel_group_ranks(groups._get_max_expert_size_name()) == [rank]
    groups._create_expert_and_data_parallel(2)
    groups._create_expert_and_data_parallel(4)
    assert groups._get_expert_parallel_group_ranks("ep_size_2") == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == [rank % 2, rank % 2 + 2]
    assert groups._get_expert_parallel_rank("ep_size_4") == rank and groups._get_max_expert_size_name() == "ep_size_4"
    assert groups._get_expert_broadcast_src_rank("ep_size_2") == rank % 2
    assert groups._get_expert_parallel_src_rank("ep_size_2") == rank // 2 * 2
    assert set(groups._get_expert_parallel_group_dict()) == {"ep_size_2", "ep_size_4"}
    summed = torch.tensor([float(rank)])
    torch_dist.all_reduce(summed, group=groups._get_expert_data_parallel_group("ep_size_2"))
    assert summed.item() == 2 * (rank % 2) + 2
    with pytest.raises(DeepSpeedConfigError, match=r"on the ranks \[0, 1\], \[2, 3\], as for earlier"):
        groups._create_expert_and_data_parallel(2, use_data_before_expert_parallel_=True)
