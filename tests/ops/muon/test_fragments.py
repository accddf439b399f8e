"""Muon: which rank orthogonalizes which matrix, and which parts of matrices are sent for that."""

import math

import pytest
import torch

from deepspeed.ops.fragments import SharedTensor
from deepspeed.ops.muon.fragments import plan_rounds
from tests.ops.fragments import SHAPES, Layout


def planned(layout, round_numel=1 << 30):
    return plan_rounds(layout.shared(), layout.world_size, round_numel)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_owners_are_balanced(world_size):
    (found,) = planned(Layout([(64, 64)] * 28, world_size))
    load = [len(found.owned_by(position)) for position in range(world_size)]
    assert max(load) - min(load) <= 1


def test_matrices_that_lie_on_one_rank_are_shared_out():
    (found,) = planned(Layout([(64, 64)] * 8, 2, [0]))
    assert [len(found.owned_by(position)) for position in range(2)] == [4, 4]


def test_uncut_balanced_matrices_are_not_sent():
    (found,) = planned(Layout([(64, 64)] * 8, 2))
    assert all(fragment.peer == position for position in range(2) for fragment in found.sent_by(position))


def test_rounds_are_bounded():
    rounds = planned(Layout([(64, 64)] * 8, 2), 2 * 64 * 64)
    assert [len(found.owners) for found in rounds] == [2, 2, 2, 2]


@pytest.mark.parametrize("cuts", [None, [0, 0], [640, 640], [320, 1024]])
def test_what_is_sent_is_what_is_received(cuts):
    """Every rank finds out alone; together the fragments make up each matrix once."""
    layout = Layout(SHAPES, 3, cuts)
    (found,) = planned(layout)
    sent = {(p.tensor.index, p.start, p.stop, at, p.peer) for at in range(3) for p in found.sent_by(at)}
    received = {(p.tensor.index, p.start, p.stop, p.peer, at) for at in range(3) for p in found.received_by(at)}
    assert sent == received
    for index, shape in enumerate(SHAPES):
        parts = sorted((start, stop) for number, start, stop, *_ in sent if number == index)
        assert parts[0][0] == 0 and parts[-1][1] == math.prod(shape)
        assert all(before[1] == after[0] for before, after in zip(parts, parts[1:], strict=False))


def owners_by_trying_all(tensors, world_size):
    """The rule of ``deepspeed.ops.muon.fragments``, by looking at every rank for every matrix."""
    load, owners = [0] * world_size, {}
    fair = sum(tensor.numel for tensor in tensors) / world_size
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.numel, tensor.index)):
        share = [tensor.numel_at(position) for position in range(world_size)]
        best = min(range(world_size), key=lambda position: (-share[position], load[position], position))
        if load[best] and load[best] + tensor.numel > fair:
            best = min(range(world_size), key=lambda position: (load[position], -share[position], position))
        load[best] += tensor.numel
        owners[tensor.index] = best
    return owners


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 40, 100])
def test_owners_are_those_of_the_whole_search(world_size):
    generator = torch.Generator().manual_seed(world_size)
    shapes = [tuple(torch.randint(2, 90, (2,), generator=generator).tolist()) for _ in range(40)] + [(64, 64)] * 20
    layout = Layout(shapes, world_size)
    (found,) = planned(layout)
    assert {tensor.index: owner for tensor, owner in found.owners} == owners_by_trying_all(layout.shared(), world_size)


def test_placement_at_many_ranks_costs_little():
    """One matrix in ten thousand ranks and ten thousand matrices in ten ranks: what is looked at grows with neither."""
    looked_at = 0

    class Counting(SharedTensor):
        def held_by(self, position):
            nonlocal looked_at
            looked_at += 1
            return super().held_by(position)

    for world_size, count in ((10_000, 50), (10, 5_000)):
        slice_numel = 64 * 64 * count // world_size // 64 * 64 + 64
        bounds = range(0, slice_numel * world_size + 1, slice_numel)
        tensors = [Counting(f"t{i}", i, (64, 64), 0, 64 * 64 * i, bounds) for i in range(count)]
        looked_at = 0
        (found,) = plan_rounds(tensors, world_size, 1 << 60)
        found.sent_by(world_size // 2)
        found.received_by(world_size // 2)
        assert looked_at <= 6 * count + world_size


def test_vectors_are_refused_by_name():
    with pytest.raises(ValueError, match=r"b has shape .*use_muon=False"):
        plan_rounds([SharedTensor("b", 0, (20,), 0, 0, range(0, 65, 64))], 1, 1 << 30)
