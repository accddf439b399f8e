"""Every wait is watched: whoever waits in vain, and for what, is named on all ranks within seconds."""

import ast
import time
from collections.abc import Iterator

import pytest
import torch

import deepspeed
from deepspeed import comm
from deepspeed.comm.job.job import Job
from deepspeed.errors import CommunicationError, DivergenceError
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.muon.muon import Muon
from tests.engine.support import engine_of, inputs, rank
from tests.harness import run_ranks
from tests.harness.toy_models import tower
from tests.project import graph

LIMIT = 60.0  # seconds; below the time limit of the ranks' group


def _complaint(action):
    """What the call raises, and whether it raised in time."""
    started = time.monotonic()
    try:
        action()
    except (CommunicationError, DivergenceError) as error:
        return type(error).__name__, str(error), time.monotonic() - started < LIMIT
    return "nothing", "", True


# -- a cycle through several groups ---------------------------------------------------------------------------------


def _cycle():
    following = [comm.new_group(pair) for pair in ([0, 1], [1, 2], [0, 2])][rank()]
    comm.all_reduce(torch.ones(1))
    return _complaint(lambda: comm.all_reduce(torch.ones(3), group=following))


def test_a_cycle_over_three_groups_is_named_on_all_ranks():
    kinds, words, in_time = zip(*run_ranks(_cycle, 3), strict=True)
    assert set(kinds) == {"DivergenceError"} and all(in_time) and len(set(words)) == 1, words
    for who, others in ((0, "0, 1"), (1, "1, 2"), (2, "0, 2")):
        assert f"rank {who} waits for all_reduce of 3 elements among ranks {others}" in words[0]


UNLIKE = {
    "two collectives": (
        ("barrier", lambda: comm.barrier()),
        ("all_gather_object", lambda: comm.all_gather_object([None, None], 1)),
    ),
    "the making of a group": (
        ("new_group([0, 1])", lambda: comm.new_group([0, 1])),
        ("broadcast of 2 elements", lambda: comm.broadcast(torch.ones(2), 0)),
    ),
    "two tags": (
        ("send of 2 elements to rank 1", lambda: comm.send(torch.ones(2), 1, tag=4)),
        ("recv of 2 elements from rank 0", lambda: comm.recv(torch.ones(2), 0, tag=5)),
    ),
    "the package's groups": (
        ("new_group([1])", lambda: comm.new_group([1])),
        (
            "the making of process groups [[0], [1]]",
            lambda: Job.adopt().process_groups.mine([[0], [1]], backend="gloo", timeout=None, why="a test"),
        ),
    ),
}


def _unlike(name):
    return _complaint(UNLIKE[name][rank()][1])


@pytest.mark.parametrize("name", UNLIKE)
def test_calls_that_do_not_match(name):
    first, second = run_ranks(_unlike, 2, name)
    assert first[0] == "DivergenceError" and first == second and first[2], (first, second)
    for who, (what, _) in enumerate(UNLIKE[name]):
        assert f"rank {who} waits for {what}" in first[1]


# -- save_checkpoint on one rank only --------------------------------------------------------------------------------


def _one_saves(stage, folder, others):
    engine = engine_of(tower(), stage)

    def train():
        for step in range(4):
            engine.backward(engine(inputs(step, rank())))
            engine.step()

    def end():
        Job.adopt().watched.watch.post_exit_notice()  # as the end of a program does

    if others == "start again":
        train()
        return _complaint(lambda: engine.save_checkpoint(folder) if rank() == 0 else engine_of(tower(), stage))
    return _complaint(lambda: engine.save_checkpoint(folder) if rank() == 0 else {"train": train, "end": end}[others]())


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_saves_while_the_other_trains_on(stage, tmp_path):
    """It was silent for the whole time limit, as the wait was inside torch, and then the gradients got the blame."""
    first, second = run_ranks(_one_saves, 2, stage, str(tmp_path), "train")
    assert first[0] == second[0] == "DivergenceError" and first[1:] == second[1:] and first[2], (first, second)
    assert "rank 0 waits for save_checkpoint(" in first[1] and "rank 1 waits for " in first[1]


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_saves_while_the_other_ends(stage, tmp_path):
    first, second = run_ranks(_one_saves, 2, stage, str(tmp_path), "end")
    assert first[0] == "CommunicationError" and first[2] and second[0] == "nothing", (first, second)
    assert "rank 1 has ended while this rank waits for save_checkpoint(" in first[1]


def test_one_rank_saves_while_the_other_begins_another_engine(tmp_path):
    first, second = run_ranks(_one_saves, 2, 1, str(tmp_path), "start again")
    assert first[0] == second[0] == "DivergenceError" and first[2] and second[2]
    assert "rank 1 waits for the comparison of the configurations of all ranks (deepspeed.initialize)" in first[1]


# -- initialize ------------------------------------------------------------------------------------------------------


def _one_initializes():
    deepspeed.init_distributed()
    if rank() == 0:
        return _complaint(lambda: engine_of(tower(), 2))
    Job.adopt().watched.watch.post_exit_notice()
    return _complaint(lambda: None)


def test_one_rank_initializes_while_the_other_ends():
    first, _ = run_ranks(_one_initializes, 2)
    assert first[0] == "CommunicationError" and first[2]
    assert "rank 1 has ended while this rank waits for the comparison of the configurations" in first[1]


# -- optimizers that talk ----------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "LAMB's norms of weights and updates": (FusedLamb, "deepspeed.ops.lamb.fused_lamb.add_over_ranks"),
    "the matrices of Muon": (Muon, "deepspeed.ops.muon.fragments.exchange_parts"),
}


def _one_leaves_the_update(words):
    """In the middle of the update, the second rank does something else."""
    make, exchange = OPTIMIZERS[words]
    engine = engine_of(tower(), 1, optimizer=lambda model: make(model.parameters()))
    engine.backward(engine(inputs(rank())))
    if rank() == 0:
        return _complaint(engine.step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, lambda *arguments, **options: comm.barrier())
        return _complaint(engine.step)


@pytest.mark.parametrize("words", OPTIMIZERS)
def test_waits_of_optimizers(words):
    first, second = run_ranks(_one_leaves_the_update, 2, words)
    assert first == second and first[0] == "DivergenceError" and first[2], (first, second)
    assert f"rank 0 waits for {words}" in first[1] and "rank 1 waits for barrier" in first[1]


# -- the class of the fault --------------------------------------------------------------------------------------------

BLOCKING = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "monitored_barrier", "new_group", "recv", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "send", "init_device_mesh"),
}
SETTING_UP = {"barrier", "monitored_barrier", "new_group", "init_device_mesh"}
SUPERVISED = {"comm.collectives", "comm.job.new_groups", "comm.start.process_group"}


def test_nobody_else_waits_inside_torch():
    """Calls of torch that block until other ranks do something are made where they are watched."""
    wrong = []
    for module in graph.modules():
        if module.removeprefix("deepspeed.") in SUPERVISED:
            continue
        for node in graph.nodes_of(module, ast.Call):
            if not isinstance(node.func, ast.Attribute) or node.func.attr not in BLOCKING:
                continue
            owner = ast.unparse(node.func.value)
            starts = any(keyword.arg == "async_op" for keyword in node.keywords)
            if owner in ("dist", "torch_dist", "torch.distributed") and not starts:
                wrong.append(f"{graph.path_of(module)}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, "use deepspeed.comm's, which are watched:\n" + "\n".join(wrong)


NO_TRANSPORT = {
    "autotuning.probes": "measures torch's collectives",
    "comm.speed": "measures torch's collectives",
    "integrations.openrlhf": "reduces and gathers what the program says, when it says so",
    "integrations.verl": "counts the tokens of the program's batch over the group that verl uses",
    "parallel.partitioned_tensor": "gathers tensors of the program over its own groups, when it says so",
    "plan.measuring.machine": "measures a machine, in a program of its own",
}
"""Modules that may call ``deepspeed.comm``'s form of torch's collectives, and why."""


COLLECTIVES = BLOCKING - SETTING_UP


def _collectives_used(source: str | ast.AST) -> Iterator[ast.expr]:
    """Yields where ``deepspeed.comm``'s form of a collective is named, as its attribute or imported from it."""
    imported = {
        alias.asname or alias.name
        for node in graph.nodes_of(source, ast.ImportFrom)
        if node.module in ("deepspeed.comm", "deepspeed.comm.collectives")
        for alias in node.names
        if alias.name in COLLECTIVES
    }
    for node in graph.nodes_of(source, ast.Name, ast.Attribute):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            if ast.unparse(node.value) in ("comm", "deepspeed.comm", "collectives"):
                yield node
        elif isinstance(node, ast.Name) and node.id in imported:
            yield node


def test_a_training_exchanges_through_transports():
    """Everything else is in the traffic books of its axis, as the collectives of ``deepspeed.comm`` are not."""
    places: dict[str, list[str]] = {}
    for module in graph.modules():
        for node in _collectives_used(module):
            place = f"{graph.path_of(module)}:{node.lineno} {ast.unparse(node)}"
            places.setdefault(module.removeprefix("deepspeed."), []).append(place)
    wrong = [place for module, found in places.items() if module not in NO_TRANSPORT for place in found]
    assert not wrong, "use a transport (deepspeed.comm.job.axis.Axis):\n" + "\n".join(wrong)
    assert not NO_TRANSPORT.keys() - places.keys(), "these use no collective, so they need no exemption"


def test_collectives_are_found_by_attribute_and_by_import():
    used = (
        "from deepspeed.comm import all_reduce as add, barrier\nadd(x)\nbarrier()\nf(comm.broadcast)\ntensor.gather(0)"
    )
    assert [ast.unparse(node) for node in _collectives_used(ast.parse(used))] == ["add", "comm.broadcast"]
