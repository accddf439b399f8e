"""The registry of parallel groups: a purely data-parallel world, and one that an mpu describes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as torch_dist

from deepspeed.comm import groups
from deepspeed.errors import CallOrderError, NotYetSupportedError
from tests.harness import run_ranks


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


def check_mpu_is_asked() -> None:
    size, rank = torch_dist.get_world_size(), torch_dist.get_rank()
    unit = TwoByOne()
    groups.initialize(mpu=unit)
    try:
        assert groups._get_model_parallel_group() is groups.get_tensor_model_parallel_group() is unit.model_group
        assert groups.get_model_parallel_world_size() == size and groups.get_model_parallel_rank() == rank
        assert groups.get_tensor_model_parallel_src_rank() == 0
        assert groups.get_data_parallel_group() is groups._get_sequence_data_parallel_group() is unit.data_group
        # What the mpu does not say follows from what it says.
        assert groups._get_data_parallel_world_size() == 1 and groups._get_data_parallel_rank() == 0
        assert groups._get_broadcast_src_rank() == rank
    finally:
        groups.set_mpu(None)


def test_mpu_is_asked():
    run_ranks(check_mpu_is_asked, 2)


def test_errors_are_sentences():
    with pytest.raises(NotYetSupportedError, match="ep_size=2.*use ep_size=1"):
        groups.initialize(ep_size=2)
    with pytest.raises(CallOrderError, match="init_distributed"):
        groups.initialize()
    with pytest.raises(NotYetSupportedError, match="ep_size_4"):
        groups._get_expert_parallel_world_size("ep_size_4")
