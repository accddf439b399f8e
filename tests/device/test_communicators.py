"""Communicators are made once and have one owner at a time."""

import gc
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import CallOrderError
from deepspeed.moe.layer import MoE
from deepspeed.plan.decoder import Decoder, DecoderShape
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import safe_get_full_fp32_param
from tests.device.support import engine_at
from tests.engine.support import inputs, rank
from tests.harness import on_ranks, run_ranks
from tests.harness.device import simulated_rank
from tests.harness.toy_models import tower
from tests.parallel.pipe import support as pipes

# Every communicator has one owner: an engine, which gives it back, or the job, in which all engines share it.


class _WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(tower(depth=1).first.in_features, 8)
        self.experts = MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=2, k=2, top2_2nd_expert_sampling=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, balance, _ = self.experts(self.first(x))
        return out.square().mean() + 0.01 * balance


def _tokens() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(7)
    return [torch.randint(0, 32, (2, 8), generator=random) for _ in ("input_ids", "labels")]


def _step(engine: Any, values: list[torch.Tensor]) -> float:
    loss = engine(*(value.to(engine.device) for value in values))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


class _Engines:
    """Makes engines of one kind, and trains them.

    Args:
        kind: Of ``KINDS``.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def make(self) -> Any:
        torch.manual_seed(1)
        if self._kind == "pipeline":
            return pipes.engine_of(2, 1, 3)
        if self._kind == "experts":
            return engine_at(1, precision="fp32", model=_WithExperts())
        if self._kind == "islands":
            islands = {"communication_compression": {"islands": {"size": 1, "sync_every": 1}}}
            return engine_at(1, precision="fp32", **islands)
        if self._kind == "zero.Init":
            with deepspeed.zero.Init():
                model = tower(depth=2)
            return engine_at(3, precision="fp32", model=model)
        key = {"tensor": {"tensor_parallel": {"autotp_size": 2}}, "sequence": {"sequence_parallel_size": 2}}
        model = Decoder(DecoderShape(layers=1, hidden=16, heads=2, vocab=32, intermediate=16))
        return engine_at(1, precision="fp32", model=model, **key[self._kind])

    def train(self, engine: Any) -> list[float]:
        if self._kind == "pipeline":
            device = engine.device
            items = [tuple(value.to(device) for value in item) for item in pipes.items(0, 0, 3)]
            return [engine.train_batch(iter(items)).item()]
        values = _tokens() if self._kind in ("tensor", "sequence") else [inputs(0, rank())]
        return [_step(engine, values) for _ in range(2)]


KINDS = {"pipeline": 3, "tensor": 1, "sequence": 2, "experts": 6, "islands": 0, "zero.Init": 2}
"""By kind: what two engines at once need more than one, over a backend in which the order of transfers matters.

That is what an engine owns: gathers and reductions, of experts too, and of several stages or tensor ranks what decides
about an update. An engine alone on its island or with tensor ranks only has nobody to gather from.
"""


def _live_transports() -> int:
    gc.collect()
    return sum(isinstance(each, Transport) for each in gc.get_objects())


def _engines_in_turn(kind: str, on_device: bool) -> dict[str, list[Any]]:
    """Trains two engines at once, one after the first is destroyed, and two after both are; a sixth time the fourth."""
    if on_device:
        with simulated_rank():
            return _engines_in_turn(kind, False)
    engines = _Engines(kind)
    made: list[int] = []
    losses: list[list[float]] = []
    live: list[int] = []
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:

        def start() -> Any:
            engine = engines.make()
            losses.append(engines.train(engine))
            made.append(new_group.call_count)
            return engine

        first, second = start(), start()
        first.destroy()
        first = start()
        live.append(_live_transports())
        first.destroy(), second.destroy()
        first, second = start(), start()
        live.append(_live_transports())
        engines.train(first)  # beside the one that was made after it
        first.destroy(), second.destroy()
    return {"made": made, "losses": losses, "live": live}


@pytest.mark.parametrize("kind", KINDS)
def test_engines_use_communicators_again(kind: str) -> None:
    for found in run_ranks(_engines_in_turn, 2, kind, True, backend=None):
        made = found["made"]
        assert made[1:] == [made[0] + KINDS[kind]] * 4, made
        assert found["losses"] == found["losses"][:1] * 5
        if kind != "experts":  # a layer keeps the graph of its last balance loss, and that the engine's parameters
            assert found["live"][0] == found["live"][1]


@pytest.mark.parametrize("kind", ["pipeline", "tensor", "islands"])
def test_gloo_groups_are_made_once(kind: str) -> None:
    for found in run_ranks(_engines_in_turn, 2, kind, False):
        assert found["made"] == found["made"][:1] * 5
        assert found["losses"] == found["losses"][:1] * 5
        assert found["live"][0] == found["live"][1]


def _wires(engine: Any) -> set[int]:
    return {id(group) for group in engine._interpreter.channels._native.values()}


@on_ranks(2, backend=None)
def test_a_communicator_is_left_alone_after_a_batch_that_failed_on_one_rank() -> None:
    with simulated_rank():
        engines = _Engines("pipeline")
        first, second = engines.make(), engines.make()
        assert len(_wires(first)) == 4 and _wires(first) == _wires(second)
        with suppress(ArithmeticError), first._interpreter.channels.batch():
            if rank() == 1:
                raise ArithmeticError
        third = engines.make()
        assert not _wires(third) & _wires(first)
        engines.train(third)


@on_ranks(2, backend=None)
def test_a_communicator_is_left_alone_after_a_collective_of_one_rank() -> None:
    with simulated_rank(), mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        engines = _Engines("tensor")
        engine = engines.make()
        before = new_group.call_count
        record = next(r for r in Job.adopt().watched.records() if r.made and r.made.use == "the parts of layers")
        transport = Job.adopt().connector.over(record.group, engine.device)
        transport.issue("reduce") if rank() == 0 else None
        engine.destroy()
        engines.train(engines.make())
        assert new_group.call_count == before + 1


@on_ranks(2, backend=None)
def test_a_lease_owns_what_one_user_has_for_itself() -> None:
    made = []
    with simulated_rank(), mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        for _ in range(3):
            model = tower(depth=1).to("cuda")
            offload = DeepSpeedZeRoOffload(model, param_persistence_threshold=0)
            with torch.no_grad():
                model(inputs(0, 0).to("cuda"))
            offload.destroy()
            made.append(new_group.call_count)
        lists = [list(range(dist.get_world_size()))]
        with pytest.raises(CallOrderError, match="an open lease"):
            Job.adopt().process_groups.mine(lists, backend="nccl", timeout=None, why="a test")
    assert made == [2, 2, 2]


# Communicators go from a destroyed engine to the next one, and never serve two engines at once.


def _losses(engine: Any) -> list[float]:
    losses = []
    for number in range(2):
        loss = engine(inputs(number, rank()).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _one_after_another(stage: int, zero: dict[str, Any]) -> tuple[list[int], list[list[float]]]:
    made, losses = [], []
    with simulated_rank(), mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        for _ in range(5):
            engine = engine_at(stage, precision="fp32", zero=zero)
            losses.append(_losses(engine))
            engine.destroy()
            made.append(new_group.call_count)
    return made, losses


@pytest.mark.parametrize(
    ("stage", "ranks", "zero"),
    [(1, 2, {}), (3, 2, {}), (3, 4, {"zero_hpz_partition_size": 2})],
    ids=["stage 1", "stage 3", "hpz"],
)
def test_the_next_engine_makes_no_communicators(stage: int, ranks: int, zero: dict[str, Any]) -> None:
    for made, losses in run_ranks(_one_after_another, ranks, stage, zero, backend=None):
        assert made[0] >= 2
        assert made == made[:1] * 5, made
        assert losses == losses[:1] * 5


def _groups_of(engine: Any) -> set[int]:
    group = engine._parts.groups["data"]
    return {id(group.gather.group), id(group.reduce.group)}


@on_ranks(2, backend=None)
def test_communicators_have_one_engine_at_a_time() -> None:
    with simulated_rank(), mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        first, second = (engine_at(3, precision="fp32") for _ in range(2))
        assert len(_groups_of(first) | _groups_of(second)) == 4
        assert new_group.call_count == 4
        assert _losses(first) == _losses(second)

        # The successor trains on the groups of the first, which still answers.
        used = _groups_of(first)
        weight = first.module.first.weight
        value = safe_get_full_fp32_param(weight)
        first.destroy()
        first.destroy()
        third = engine_at(3, precision="fp32")
        assert _groups_of(third) == used
        loss = third(inputs(0, rank()).to(third.device))
        assert torch.equal(safe_get_full_fp32_param(weight), value)
        third.backward(loss)
        third.step()
        assert new_group.call_count == 4

        # One rank has not destroyed its engine: no rank takes its groups.
        if rank() == 0:
            second.destroy()
        fourth = engine_at(3, precision="fp32")
        assert new_group.call_count == 6
        assert not _groups_of(fourth) & (_groups_of(second) | _groups_of(third))
        second.destroy()

        # One rank has issued a collective that the other has not: it would be taken for the next one's.
        broken = fourth._parts.groups["data"].gather
        broken.issue("gather") if rank() == 0 else None
        fourth.destroy()
        fifth, sixth = (engine_at(3, precision="fp32") for _ in range(2))
        assert id(broken.group) not in _groups_of(fifth) | _groups_of(sixth)
        assert new_group.call_count == 7
        _losses(fifth), _losses(sixth)
