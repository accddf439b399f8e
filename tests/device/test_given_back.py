"""Communicators go from a destroyed engine to the next one, and never serve two engines at once."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.utils import safe_get_full_fp32_param
from tests.device.support import engine_at
from tests.engine.support import inputs, rank
from tests.harness import on_ranks, run_ranks
from tests.harness.device import simulated_rank


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
