"""Gathers that cross nodes once: four ranks as two nodes of two."""

import os

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.base.counters import counted, traffic
from deepspeed.comm.base.environment import ranks_per_node
from deepspeed.comm.host.nodes import GlooByNodes, NativeByNodes, Nodes, nodes_under
from deepspeed.comm.job.grid import grid_mesh
from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.native import NativeTransport
from deepspeed.comm.transports.transport import transfer_key
from deepspeed.errors import DeepSpeedConfigError
from tests.engine.support import SHARDED, engine_of, inputs, rank
from tests.harness import on_ranks
from tests.harness.toy_models import tower
from tests.zero.gather.test_agreement import ChooserTower
from tests.zero.reading import full_masters

MESH = grid_mesh(4, 2)
TWO_OF_TWO = [(2, 0), (2, 1), (2, 0), (2, 1)]


def test_where_ranks_lie():
    nodes = Nodes(count=3, width=4)
    assert nodes.neighbors(6) == [4, 5, 7] and nodes.counterparts(6) == [2, 10]
    assert nodes_under(TWO_OF_TWO, [range(4)]) == Nodes(2, 2)
    assert nodes_under(TWO_OF_TWO * 2, [range(4), range(4, 8)]) == Nodes(2, 2)
    assert nodes_under(TWO_OF_TWO, [range(2), range(2, 4)]) == "the 2 ranks that share parameters are on one node of 2"
    # Groups along an axis that is not the fastest one: two of each node's four ranks.
    assert nodes_under([(4, place) for place in range(4)] * 2, [range(0, 8, 2), range(1, 8, 2)]) == Nodes(2, 2)
    assert "on as many nodes" in nodes_under([(4, place) for place in range(4)] * 2, [[r, r + 4] for r in range(4)])
    assert nodes_under([(1, 0)] * 4, [range(2), range(2, 4)]) == "every node has one rank"


@pytest.mark.parametrize(
    ("reports", "size", "words"),
    [
        ([(4, place) for place in range(4)] * 3, 6, "6 ranks that share .* do not fill whole nodes of 4"),
        ([(2, 0), (2, 1), (1, 0)], 3, "rank 2 as number 0 of 1"),
        ([(2, 0), (2, 0), (2, 1), (2, 1)], 4, "rank 1 as number 0 of 2"),
    ],
)
def test_cut_nodes_are_refused(reports, size, words):
    with pytest.raises(DeepSpeedConfigError, match=words):
        nodes_under(reports, [range(first, first + size) for first in range(0, len(reports), size)])


def test_ranks_per_node():
    assert ranks_per_node({"LOCAL_WORLD_SIZE": "3"}, 6, 8) == 3
    assert ranks_per_node({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 6, 8) == 2
    step = {"SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    assert [ranks_per_node({**step, "SLURM_NODEID": str(node)}, 7, 1) for node in range(4)] == [2, 2, 2, 1]
    assert (ranks_per_node({}, 16, 8), ranks_per_node({}, 4, 8), ranks_per_node({}, 4, 0)) == (8, 4, 4)


def _as_two_nodes():
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank() % 2))


NUMEL = 4 * 6


def _buffer(transport, number):
    """This rank's slice in place, garbage elsewhere."""
    flat = torch.full((NUMEL,), float("nan"))
    transport.my_slice(flat).copy_(torch.arange(NUMEL // 4) + 100.0 * transport.rank + number)
    return flat


def _native(plain):
    """Two groups, as ``Connector.by_nodes`` makes them for backends other than gloo."""
    groups = [
        [dist.new_group(ranks) for ranks in axis][index]
        for axis, index in ((MESH.groups("replicate"), rank() % 2), (MESH.groups("shard"), rank() // 2))
    ]
    far, near = (NativeTransport(group, dist.get_rank(group), 2, torch.device("cpu")) for group in groups)
    native = NativeTransport(plain.group, plain.rank, 4, torch.device("cpu"))
    native.take_place_of(plain)
    return NativeByNodes(native, Nodes(2, 2), far, near)


@on_ranks(4)
def test_slices_arrive_where_a_flat_collective_puts_them_and_cross_nodes_once() -> None:
    _as_two_nodes()
    plain = Job.adopt().axis_of().transport()
    gloo = Job.adopt().connector.by_nodes(plain, plain, [range(4)], device=None, timeout=None)
    assert isinstance(gloo, GlooByNodes) and gloo.nodes == Nodes(2, 2)
    sent = {}
    for name, transport in (("plain", plain), ("gloo", gloo), ("native", _native(plain))):
        buffers, works = [], []
        with counted():
            for number in range(3):
                buffers.append(_buffer(transport, number))
                works.append(transport.all_gather(buffers[-1], key=transfer_key(1, number, 0, 1), label="a test"))
            order = (2, 0, 1) if name == "gloo" else (0, 1, 2)
            for number in order:
                works[number].wait()
                works[number].wait()
            sent[name] = {key: tally.nbytes for key, tally in traffic.ran.items()}
            assert traffic.requested["all_gather"].nbytes == 3 * NUMEL * 4
        for number, flat in enumerate(buffers):
            expected = torch.cat([torch.arange(NUMEL // 4) + 100.0 * r + number for r in range(4)])
            assert torch.equal(flat, expected), (name, number)
    slices = 3 * NUMEL  # bytes of a slice, three buffers
    assert sent["plain"] == {"send": 3 * slices}  # two of the three peers are on the other node
    assert sent["gloo"] == {"send between nodes": slices, "send inside nodes": 2 * slices}
    assert sent["native"] == {
        "all_gather_into_tensor between nodes": slices,
        "all_gather_into_tensor inside nodes": 2 * slices,
    }


@on_ranks(4)
def test_a_rank_hands_on_before_it_blocks() -> None:
    """Rank 3 waits for a buffer that rank 2 must hand on, while rank 2 blocks where rank 3 comes only later."""
    _as_two_nodes()
    plain = Job.adopt().axis_of().transport()
    transport = Job.adopt().connector.by_nodes(plain, plain, [range(4)], device=None, timeout=None)
    flats = [_buffer(transport, number) for number in range(2)]
    works = [transport.all_gather(flat, key=transfer_key(2, n, 0, 1), label="a test") for n, flat in enumerate(flats)]
    if rank() != 2:
        works[0].wait()
    rows = transport.gather_small(torch.tensor([rank()]), channel="call", label="something else")
    assert rows.view(-1).tolist() == [0, 1, 2, 3]
    for work in works:
        work.wait()
    transport.progress_pending()
    assert not any(flat.isnan().any() for flat in flats)


# -- engines ---------------------------------------------------------------------------------------------------------


def _train(zero, model=tower, steps=3, call=None):
    torch.manual_seed(3)
    engine = engine_of(model(), 3, zero={**zero, "mics_shard_size": 4}, bf16={"enabled": True})
    losses = []
    for step in range(steps):
        loss = engine(inputs(step, rank())) if call is None else call(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = full_masters(engine)
    is_by_nodes = isinstance(engine._runtime.groups["data"].gather, GlooByNodes)
    engine.destroy()
    return losses, found, is_by_nodes


def _uneven(engine, step):
    """Every rank leaves out other modules of the agreed order."""
    model = engine.module
    skipped = (rank() + step) % 4 if step else 9

    def hidden(x):
        for index, layer in enumerate(model.layers):
            x = layer(x, 2) if index % 4 != skipped else x
        return x.float().square().mean()

    model.forward = lambda x: hidden(x)
    return engine(inputs(step, rank()).bfloat16())


@on_ranks(4)
def test_engines_have_the_same_bits_either_way() -> None:
    _as_two_nodes()
    for zero in (SHARDED, {"stage3_param_persistence_threshold": 0}):
        for call, model in ((None, tower), (_uneven, ChooserTower)):
            runs = []
            for key in (False, True):
                runs.append(_train({**zero, "mics_hierarchical_params_gather": key}, model, 4, call))
            (losses, masters, one), (other_losses, other_masters, two) = runs
            assert (one, two) == (False, True)
            assert losses == other_losses
            for name, value in masters.items():
                assert torch.equal(value, other_masters[name]), name


@on_ranks(4)
def test_where_two_steps_would_be_one() -> None:
    """Groups of two: the key changes nothing on nodes of two or four ranks."""
    for width in (2, 4):
        os.environ.update(LOCAL_WORLD_SIZE=str(width), LOCAL_RANK=str(rank() % width))
        zero = {**SHARDED, "mics_shard_size": 2, "mics_hierarchical_params_gather": True}
        engine = engine_of(tower(), 3, zero=zero)
        assert not isinstance(engine._runtime.groups["data"].gather, GlooByNodes)
        engine.destroy()
    os.environ.update(LOCAL_WORLD_SIZE="3", LOCAL_RANK=str(rank() % 3))
    with pytest.raises(DeepSpeedConfigError, match="do not fill whole nodes of 3"):
        engine_of(tower(), 3, zero={**zero, "mics_shard_size": 4})


@pytest.mark.slow
@on_ranks(8, timeout=200)
def test_several_groups_over_several_nodes() -> None:
    """Eight ranks: two groups of four, each over two nodes of two."""
    _as_two_nodes()
    runs = [_train({**SHARDED, "mics_hierarchical_params_gather": key}) for key in (False, True)]
    assert [run[2] for run in runs] == [False, True] and runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())
