"""The arithmetic of a mesh: any axes, any order of the ranks, any choice of axes."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.axes import AXES, DATA
from deepspeed.comm.job import mesh_sources
from deepspeed.comm.job.mesh import Mesh, data_mesh, mesh_of_places
from deepspeed.errors import DeepSpeedConfigError


@st.composite
def meshes(draw):
    names = draw(st.permutations(AXES))[: draw(st.integers(0, len(AXES)))]
    axes = tuple((name, draw(st.integers(1, 4))) for name in names)
    size = Mesh(axes).world_size
    return Mesh(axes, tuple(draw(st.permutations(range(size)))) if draw(st.booleans()) else ())


def chosen(draw, mesh):
    return tuple(draw(st.permutations(AXES)))[: draw(st.integers(0, len(AXES)))]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_groups_positions_and_coordinates_agree(data):
    mesh = data.draw(meshes())
    axes = chosen(data.draw, mesh)
    world = range(mesh.world_size)
    assert [mesh.rank_at(mesh.coordinate(rank)) for rank in world] == list(world)
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(world)  # every rank in exactly one
    others = mesh.others(*axes)
    for number, group in enumerate(groups):
        assert len(group) == mesh.size(*axes)
        for position, rank in enumerate(group):
            assert mesh.position(rank, *axes) == position and mesh.group(rank, *axes) == group
            assert mesh.position(rank, *others) == number
            assert {name: mesh.coordinate(rank)[name] for name in others} == {
                name: mesh.coordinate(group[0])[name] for name in others
            }


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_places_of_ranks_give_the_mesh(data):
    mesh = data.draw(meshes())
    found = mesh_of_places([mesh.coordinate(rank) for rank in range(mesh.world_size)], "the test")
    assert [found.coordinate(rank) for rank in range(mesh.world_size)] == [
        {name: mesh.coordinate(rank)[name] for name in found.names} for rank in range(mesh.world_size)
    ]
    assert found.ranks == () or mesh.ranks  # ranks that are numbered as usual need no list


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_cut_axis_numbers_the_same_ranks(data):
    mesh = data.draw(meshes())
    axis = data.draw(st.sampled_from(AXES))
    inner = data.draw(st.sampled_from([n for n in range(1, 5) if mesh.size(axis) % n == 0]))
    cut = mesh.split(axis, "replicate", ("shard", inner))
    assert cut.world_size == mesh.world_size and axis not in cut.names
    for rank in range(mesh.world_size):
        assert cut.position(rank, "replicate", "shard") == mesh.position(rank, axis)
        assert set(cut.group(rank, "shard")) <= set(mesh.group(rank, axis))


def test_the_usual_order_by_hand():
    mesh = Mesh((("pipe", 2), ("data", 2), ("tensor", 2)))
    assert mesh.coordinate(5) == {"pipe": 1, "data": 0, "tensor": 1}
    assert mesh.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups("pipe", "tensor") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert mesh.groups("tensor", "pipe") == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert mesh.groups() == [[rank] for rank in range(8)]
    assert mesh.size("pipe", "data") == 4 and mesh.size("sequence") == 1
    assert data_mesh(3).groups("data") == [[0, 1, 2]] and data_mesh(3).groups("tensor") == [[0], [1], [2]]
    assert Mesh((("data", 2),), (0, 1)) == data_mesh(2)


def test_errors_have_both_numbers():
    with pytest.raises(DeepSpeedConfigError, match=r"mesh of pipe 2 x data 3 has 6 ranks, but the job has 8.*is 8"):
        Mesh((("pipe", 2), ("data", 3))).check(8)
    with pytest.raises(DeepSpeedConfigError, match="different names.*data, data"):
        Mesh((("data", 2), ("data", 2)))
    with pytest.raises(DeepSpeedConfigError, match="at least 1 rank, found tensor 0"):
        Mesh((("tensor", 0),))
    with pytest.raises(DeepSpeedConfigError, match="found 2: 0, 0"):
        Mesh((("data", 2),), (0, 0))
    with pytest.raises(DeepSpeedConfigError, match="has no rank 2; choose one of 0 to 1"):
        data_mesh(2).coordinate(2)
    with pytest.raises(DeepSpeedConfigError, match=r"no place \{'data': 2\}"):
        data_mesh(2).rank_at({"data": 2})
    with pytest.raises(DeepSpeedConfigError, match="axis 'data' of 6 ranks.*'shard' groups of 4"):
        data_mesh(6).split("data", "replicate", ("shard", 4))
    with pytest.raises(DeepSpeedConfigError, match=r"the mpu does not lay the 3 ranks.*make 4 places \(data 2"):
        mesh_of_places([{"data": 0, "tensor": 0}, {"data": 1, "tensor": 0}, {"data": 1, "tensor": 1}], "the mpu")


def test_a_dimension_of_an_unknown_name_is_refused(monkeypatch):
    """Nothing shares samples along it, so each of its ranks would train for itself."""
    unknown = SimpleNamespace(mesh_dim_names=("x",), mesh=torch.arange(2))
    with pytest.raises(DeepSpeedConfigError, match=r"mesh_param=\.\.\.\): .*found x; rename it"):
        mesh_sources.mesh_of_device_mesh(unknown)
    monkeypatch.setattr(mesh_sources, "size_of", lambda: 1)
    alone = SimpleNamespace(mesh_dim_names=("x", "dp"), mesh=torch.arange(1).view(1, 1))
    assert mesh_sources.mesh_of_device_mesh(alone).size(DATA) == 1
