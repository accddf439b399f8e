"""hpZ and MiCS: groups of ranks share the parameters, and other groups hold the same.

Four ranks in two groups of two. hpZ cuts gradients, masters and optimizer states over all ranks, MiCS over the group.
"""

import time
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.job.grid import grid_mesh
from deepspeed.comm.watch.wait_records import find_cycle
from deepspeed.errors import DivergenceError
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from deepspeed.zero.storage import StorageKind
from tests.engine.matrix.cells import AXES, Cell
from tests.engine.matrix.pairwise import pairwise
from tests.engine.matrix.run import run_cells
from tests.engine.support import SHARDED, engine_of, inputs, rank, same_on_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.harness.cases import Plain, seeded
from tests.harness.toy_models import Layer, RoutedTower, tower
from tests.zero.reading import full_masters, full_params

KINDS = {"hpZ": {"zero_hpz_partition_size": 2}, "MiCS": {"mics_shard_size": 2}}


def test_groups_of_an_axis():
    assert grid_mesh(6, 2).groups("shard") == [[0, 1], [2, 3], [4, 5]]
    assert grid_mesh(6, 2).groups("replicate") == [[0, 2, 4], [1, 3, 5]]
    assert grid_mesh(6, 3).groups("shard") == [[0, 1, 2], [3, 4, 5]]
    assert grid_mesh(6, 3).groups("replicate") == [[0, 3], [1, 4], [2, 5]]


def _post(channel, index, members, **issued):
    return {"channel": channel, "index": index, "members": members, "issued": issued}


def test_a_cycle_of_waiting_ranks_is_found_and_nothing_else():
    """Two groups (0, 1) and (2, 3) that gather, two (0, 2) and (1, 3) that combine."""
    cycle = {
        0: _post("same0", 1, [0, 2]),
        2: _post("group1", 1, [2, 3]),
        3: _post("same1", 1, [1, 3]),
        1: _post("group0", 1, [0, 1]),
    }
    for start in range(4):
        assert sorted(find_cycle(cycle, start)) == [0, 1, 2, 3]
    late = {**cycle, 2: _post("same0", 1, [0, 2], same0=1)}
    assert not any(find_cycle(late, start) for start in range(4)), "rank 2 has issued what rank 0 waits for"
    without = {rank: post for rank, post in cycle.items() if rank != 3}
    assert not any(find_cycle(without, start) for start in without), "rank 3 is merely late"
    outside = {0: _post("group0", 1, [0, 1]), 2: _post("everyone", 1, [0, 1, 2, 3])}
    assert not any(find_cycle(outside, start) for start in outside), "rank 2 has no part in what rank 0 waits for"


# -- arithmetic ------------------------------------------------------------------------------------------------------


def _cells(kind, rows):
    found = []
    for precision, accumulation, clipping, backward, optimizer, overflow in rows:
        cell = Cell(3, precision, accumulation, clipping, backward, optimizer, 4, kind, overflow)
        found.append(cell)
    return found


ROWS = [
    ("fp32", 1, 0.2, "engine", "client AdamW", False),
    ("fp32", 3, 0.0, "two", "client SGD", True),
    ("bf16", 3, 0.2, "own", "config AdamW", False),
    ("fp16", 1, 0.2, "losses", "config Lamb", True),
    ("autocast", 3, 0.0, "own losses", "config Muon", False),
]


@pytest.mark.parametrize(("kind", "rows"), [("hpZ", (0, 2, 3)), ("MiCS", (1, 3, 4))])
def test_equals_the_reference_on_four_ranks(kind, rows):
    problems = run_ranks(run_cells, 4, _cells(kind, [ROWS[row] for row in rows]), timeout=150)[0]
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_pairwise_cover_equals_the_reference(kind):
    axes = {**AXES, "overflow": [False, True]}
    del axes["stage"]
    cells = [Cell(stage=3, ranks=4, limits=kind, **row) for row in pairwise(axes)]
    for start in range(0, len(cells), 10):
        problems = run_ranks(run_cells, 4, cells[start : start + 10], timeout=230)[0]
        assert not problems, "\n".join(problems)


# -- memory and traffic ----------------------------------------------------------------------------------------------


def _sizes(kind):
    """Bytes by kind after a step against the formula, and the bytes sent inside groups and between them per phase."""
    engine = engine_of(tower(), 3, zero={**SHARDED, **KINDS[kind]}, accumulation=2, bf16={"enabled": True})
    sent = defaultdict(int)
    group = engine._runtime.groups["data"]
    for name, transport in (("near", group.gather), ("near", group.reduce), ("far", group.combine)):
        _count_sends(transport, name, sent)
    phases = []
    for micro in range(4):
        sent.clear()
        engine.backward(engine(inputs(micro, rank())))
        phases.append(dict(sent))
        sent.clear()
        engine.step()
        phases.append(dict(sent))
    for name, counted, formula, _ in engine.memory_report():
        assert counted == formula, f"{name}: {counted} counted, {formula} by formula"
    memory_tracker = engine._runtime.memory_tracker
    psi = sum(bucket.layout.numel for bucket in engine._runtime.buckets)
    assert all(bucket.is_sharded for bucket in engine._runtime.buckets)
    return (
        psi,
        memory_tracker.live(StorageKind.COMPUTE),
        memory_tracker.live(StorageKind.MASTER),
        memory_tracker.live(StorageKind.OPTIMIZER),
        phases[4:],
    )


def _count_sends(transport, name, sent):
    send = transport.send

    def counting(tensor, *args):
        sent[name] += tensor.numel() * tensor.element_size()
        return send(tensor, *args)

    transport.send = counting


def test_where_bytes_lie_and_where_they_are_sent():
    """In bytes; Psi elements in bf16, gradients summed in fp32, accumulation 2, the second step.

    hpZ: what travels between groups is the sum of gradients per micro-batch (half of Psi / 2 in fp32) and the new
    parameters (half of Psi / 2 in bf16). MiCS: the sum once per step, twice over because everybody gets it.
    """
    for psi, compute, master, optimizer, phases in run_ranks(_sizes, 4, "hpZ"):
        assert (compute, master, optimizer) == (2 * psi // 2, 4 * psi // 4, 8 * psi // 4)
        assert [phase.get("far", 0) for phase in phases] == [psi, 0, psi, psi // 2]
        assert phases[1].get("near", 0) == phases[3].get("near", 0) == 0
    for psi, compute, master, optimizer, phases in run_ranks(_sizes, 4, "MiCS"):
        assert (compute, master, optimizer) == (2 * psi // 2, 4 * psi // 2, 8 * psi // 2)
        assert [phase.get("far", 0) for phase in phases] == [0, 0, 2 * psi, 0]


# -- access ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_access_to_single_parameters(kind):
    engine = engine_of(tower(), 3, zero={**SHARDED, **KINDS[kind]}, bf16={"enabled": True})
    model = engine.module
    for step in range(2):
        engine.backward(engine(inputs(step, rank())))
        engine.step()
    before, first, last = full_masters(engine), model.first.weight, model.last.weight
    engine.backward(engine(inputs(2, rank())))
    for name, value in before.items():
        parameter = model.get_parameter(name)
        assert torch.equal(safe_get_full_fp32_param(parameter), value)
        assert same_on_all_ranks(safe_get_full_grad(parameter).tolist())
        assert safe_get_full_optimizer_state(parameter, "exp_avg").shape == value.shape
    for quantity in ("param", "fp32", "grad", "exp_avg"):
        found = dict(engine.iter_full(quantity))
        assert found.keys() == before.keys()
        if quantity == "fp32":
            assert all(torch.equal(found[name], before[name]) for name in before)
    # Each rank of a group may be the one that edits, in whichever group it is.
    for editor in range(4):
        with deepspeed.zero.GatheredParameters([first, last], modifier_rank=editor):
            if rank() == editor:
                first.data.fill_(editor + 0.5)
        assert torch.equal(full_masters(engine)["first.weight"], torch.full_like(before["first.weight"], editor + 0.5))
        assert torch.equal(full_params(engine)["first.weight"].float(), full_masters(engine)["first.weight"])
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert torch.equal(last.float(), before["last.weight"].bfloat16().float())
    safe_set_full_fp32_param(last, torch.full_like(before["last.weight"], 0.25))
    assert full_params(engine)["last.weight"].unique().tolist() == [0.25]
    safe_set_local_fp32_param(last, torch.full_like(safe_get_local_fp32_param(last), 0.75))
    assert full_masters(engine)["last.weight"].unique().tolist() == [0.75]
    assert full_params(engine)["last.weight"].unique().tolist() == [0.75]
    engine.step()
    engine.backward(engine(inputs(3, rank())))
    engine.step()
    full_masters(engine), full_params(engine)  # all copies hold the same bits


# -- construction, files, other tiers --------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.frozen = nn.Parameter(torch.randn(9), requires_grad=False)
        self.register_buffer("shift", torch.randn(9))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x * self.frozen + self.shift).square().mean()


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_built_inside_the_context(kind):
    """Built inside the context with another seed on each rank: rank 0's values count everywhere."""
    torch.manual_seed(rank())
    config = {"zero_optimization": {"stage": 3, **SHARDED, **KINDS[kind]}}
    with deepspeed.zero.MiCS_Init(config_dict_or_path=config):
        model = Wide()
    engine = engine_of(model, 3, zero={**SHARDED, **KINDS[kind]})
    plain = Plain(Wide, seed=0)
    for name, value in full_params(engine).items():
        assert torch.equal(value, plain.model.get_parameter(name).data), name
    for step in range(3):
        engine.backward(engine(inputs(step, rank())))
        engine.step()
        plain.step(lambda model, of, step=step: model(inputs(step, of)))
    plain.assert_masters(engine)
    second = engine_of(engine.module, 3, zero={**SHARDED, **KINDS[kind]})  # the model moves to another engine
    plain.assert_masters(second)


def _state(engine):
    masters = {name: value.clone() for name, value in engine.iter_full("fp32")}
    return masters, {name: value.clone() for name, value in engine.iter_full("exp_avg")}


def _zero(kind):
    return {**SHARDED, **KINDS.get(kind, {})}


def _save(folder, kind):
    engine = engine_of(tower(), 3, zero=_zero(kind), bf16={"enabled": True})
    for step in range(2):
        engine.backward(engine(inputs(step, rank())))
        engine.step()
    engine.save_checkpoint(str(folder))
    return _state(engine)


def _load(folder, kind):
    engine = engine_of(tower(seed=8), 3, zero=_zero(kind), bf16={"enabled": True})
    assert engine.load_checkpoint(str(folder))[0] is not None
    found = _state(engine)
    engine.backward(engine(inputs(2, rank())))
    engine.step()
    full_masters(engine), full_params(engine)
    return found


@pytest.mark.parametrize(
    ("saved", "loaded", "ranks"), [("hpZ", "MiCS", 4), ("MiCS", "plain", 2), ("plain", "hpZ", 4)], ids=str
)
def test_checkpoints_are_read_by_every_other_grid(tmp_path, saved, loaded, ranks):
    expected = run_ranks(_save, 4, tmp_path, saved)[0]
    for found in run_ranks(_load, ranks, tmp_path, loaded):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@on_ranks(4)
def test_masters_on_the_host():
    for kind in KINDS:
        host = {"offload_optimizer": {"device": "cpu"}}
        engines = [engine_of(tower(), 3, zero={**_zero(kind), **more}) for more in ({}, host)]
        for step in range(3):
            for engine in engines:
                engine.backward(engine(inputs(step, rank())))
                engine.step()
        plain, moved = (full_masters(engine) for engine in engines)
        assert all(torch.equal(plain[name], moved[name]) for name in plain)


# -- control flow ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_no_sync_and_groups_that_take_routes_of_their_own(kind):
    engine, plain = engine_of(tower(), 3, zero=_zero(kind)), Plain(tower)
    for step in range(2):  # two micro-batches without reduction, then the boundary
        with engine.no_sync():
            for micro in range(2):
                engine.backward(engine(inputs(step, micro, rank())))
        engine.backward(engine(inputs(step, 2, rank())))
        engine.step()
        plain.step(lambda model, of, step=step: sum(model(inputs(step, micro, of)) for micro in range(3)))
    plain.assert_masters(engine)
    # Each group takes a route of its own, which no gather minds: gradients meet at the end.
    engine, plain = engine_of(seeded(RoutedTower), 3, zero=_zero(kind)), Plain(RoutedTower)
    routes = [[0, 1, 3], [0, 1, 3], [0, 2, 3], [0, 2, 3]]
    for step in range(3):
        engine.backward(engine(inputs(step, rank()), routes[rank()]))
        engine.step()
        plain.step(lambda model, of, step=step: model(inputs(step, of), routes[of]))
    plain.assert_masters(engine, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_every_rank_of_every_group_raises_within_seconds(kind):
    torch.manual_seed(3)
    engine = engine_of(RoutedTower(), 3, zero={**_zero(kind), "agreement": "error"})
    for step in range(2):
        engine.backward(engine(inputs(step, rank()), [0, 1, 2]))
        engine.step()
    dist.barrier()
    started = time.monotonic()
    with pytest.raises(DivergenceError) as caught:
        for step in range(2, 5):
            engine.backward(engine(inputs(step, rank()), [0, 1, 3] if rank() == 3 else [0, 1, 2]))
            engine.step()
    seconds, text = time.monotonic() - started, str(caught.value)
    assert seconds < 60.0, f"{seconds:.1f} s: {text}"
    assert "layers.3" in text and "layers.2" in text, text
