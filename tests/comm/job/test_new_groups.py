"""Process groups are made by all ranks from the same list, in one order; ranks meet before torch's calls that block."""

import pytest
import torch
import torch.distributed as torch_dist

from deepspeed.comm.job import new_groups
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.errors import CommunicationError
from tests.harness import run_ranks

MESH = Mesh((("data", 2), ("tensor", 2)))


def _along(axis):
    made = [torch_dist.new_group(ranks) for ranks in MESH.groups(axis)]
    return made[[torch_dist.get_rank() in ranks for ranks in MESH.groups(axis)].index(True)]


def _as_where_order_matters(data, monkeypatch):
    """The groups that are made for transports over ``data`` on a backend that needs communicators of its own."""
    made, make = [], torch_dist.new_group
    monkeypatch.setattr(Job.adopt().ranks, "backend_for", lambda group, device: "native")

    def record(ranks, **_options):
        made.append(list(ranks))
        return make(ranks)

    monkeypatch.setattr(new_groups.dist, "new_group", record)
    with Job.adopt().process_groups.leased():
        transports = [Job.adopt().axis_of(data).transport(device=torch.device("cpu")) for _ in range(2)]
    assert [transport.ranks for transport in transports] == [tuple(torch_dist.get_process_group_ranks(data))] * 2
    assert len({transport.issue("gather") for transport in transports}) == 2
    return made


def _ranks_with_different_groups():
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = _as_where_order_matters(_along("data"), monkeypatch)
    pair, three = torch_dist.new_group([0, 1]), torch_dist.new_group([1, 2, 3])
    with pytest.raises(CommunicationError, match="must hold every rank once: the group of rank 2 differs"):
        Job.adopt().process_groups.beside(pair if torch_dist.get_rank() < 2 else three, None)
    assert isinstance(Job.adopt().axis_of(Job.adopt().process_groups.alone()).transport(), LocalTransport)
    return made


def _gloo_groups_are_made_once():
    groups = MESH.groups("tensor")
    made = [Job.adopt().process_groups.mine(groups, backend="gloo", timeout=None, why="a test") for _ in range(2)]
    other = Job.adopt().process_groups.mine(groups, backend="gloo", timeout=None, why="another")
    torch_dist.barrier()  # a rank that ends at once would close connections that a peer still makes
    return made[0] is made[1] and other is not made[0] and torch_dist.get_process_group_ranks(other) in groups


def test_all_ranks_make_the_groups_of_all_in_one_order():
    """They were made by each rank for itself: on NCCL, groups with different members met at the same keys."""
    made = run_ranks(_ranks_with_different_groups, 4)
    assert made == [[[0, 2], [1, 3]] * 2] * 4


def test_groups_that_can_be_shared_are_made_once():
    assert run_ranks(_gloo_groups_are_made_once, 4) == [True] * 4
