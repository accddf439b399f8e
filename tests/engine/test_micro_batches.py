"""Forwards and backwards in any legal order, part by part: what a schedule does gives what the plain order gives."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import CallOrderError
from deepspeed.zero import MicroBatch
from tests.engine.support import engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import Layer, tower
from tests.zero.reading import full_masters

PARTS, MICRO_BATCHES, UPDATES = 3, 4, 3
Action = tuple[str, int, int]  # "forward" or "backward", part, micro-batch


class Chain(nn.Module):
    """Parts that are called one by one; the first and the last share a weight, and a frozen layer is among them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(Layer(), Layer()) for _ in range(PARTS))
        self.parts[2][1].rise.weight = self.parts[0][0].rise.weight
        self.parts[1][0].requires_grad_(False)


def plain() -> list[Action]:
    """One micro-batch after the other."""
    order: list[Action] = []
    for number in range(MICRO_BATCHES):
        order += [("forward", part, number) for part in range(PARTS)]
        order += [("backward", part, number) for part in reversed(range(PARTS))]
    return order


def shuffled(seed: int) -> list[Action]:
    """A random order in which every action comes after what it needs."""
    choose = random.Random(seed)
    waiting = [
        [("forward", part, number) for part in range(PARTS)]
        + [("backward", part, number) for part in reversed(range(PARTS))]
        for number in range(MICRO_BATCHES)
    ]
    order = []
    while any(waiting):
        order.append(choose.choice([actions for actions in waiting if actions]).pop(0))
    return order


def positions(order: list[Action]) -> Iterator[tuple[Action, MicroBatch | None]]:
    """The actions, and of the backwards where they stand in the update."""
    backwards = [action for action in order if action[0] == "backward"]
    for action in order:
        micro = MicroBatch(action[2], is_first=action == backwards[0], is_last=action == backwards[-1])
        yield action, micro if action[0] == "backward" else None


def run_update(engine: Any, update: int, order: list[Action]) -> None:
    """Runs the actions, each part with the inputs detached from the part before it."""
    entering: dict[tuple[int, int], torch.Tensor] = {}
    leaving: dict[tuple[int, int], torch.Tensor] = {}
    for (kind, part, number), micro in positions(order):
        if kind == "forward":
            x = inputs(update, number, rank()).double() if part == 0 else leaving[part - 1, number].detach()
            entering[part, number] = x = x.clone().requires_grad_(part > 0)
            leaving[part, number] = engine.module.parts[part](x)
        elif part == PARTS - 1:
            engine.backward(leaving.pop((part, number)).square().mean(), micro_batch=micro)
        else:
            gradient = entering.pop((part + 1, number)).grad
            engine.backward([leaving.pop((part, number))], gradients=[gradient], micro_batch=micro)
    engine.step()


def chain_engine(stage: int, **zero: Any) -> Any:
    torch.manual_seed(3)
    section = {"stage3_param_persistence_threshold": 20, **zero}
    return engine_of(Chain().double(), stage, zero=section, accumulation=MICRO_BATCHES)


NOTHING_KEPT = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


@pytest.mark.parametrize(
    ("stage", "zero"),
    [(0, {}), (1, {}), (2, {"overlap_comm": True}), (3, {}), (3, NOTHING_KEPT)],
    ids=["0", "1", "2", "3", "3-nothing-kept"],
)
@on_ranks(2)
def test_any_legal_order_gives_what_the_plain_one_gives(stage: int, zero: dict[str, Any]) -> None:
    """Other orders in every update, and one seed more than one update."""
    one_by_one = chain_engine(stage, **zero)
    engine = chain_engine(stage, **zero)
    for update in range(UPDATES):
        run_update(one_by_one, update, plain())
        run_update(engine, update, shuffled(update // 2))
        assert engine.global_steps == update + 1 and engine.was_step_applied()
    assert_states_equal(full_masters(engine), full_masters(one_by_one), rtol=1e-9, atol=1e-12)


def refused(engine: Any, micro: str, *arguments: Any, **more: Any) -> None:
    with pytest.raises(CallOrderError, match=micro):
        engine.backward(*arguments, **more)


@on_ranks(1)
def test_a_driver_that_announces_something_else_raises() -> None:
    engine = engine_of(tower(), 2, accumulation=2)
    first, last = MicroBatch(0, is_first=True, is_last=False), MicroBatch(1, is_first=False, is_last=True)
    loss, one = engine(inputs(0)), torch.ones(())
    refused(
        engine, r"expected a gradient \(or None\) for each of 2 tensor\(s\), found 1", [loss, loss], gradients=[one]
    )
    refused(engine, r"tensor 0 has shape \(\), its gradient \(3,\)", loss, gradients=torch.ones(3))
    refused(engine, "no tensor requires a gradient and was given one", [loss, one], gradients=[None, one])
    refused(engine, "found list; pass the element of it that is the loss, or outputs together with gradients", [loss])
    engine.backward([one, loss], gradients=[None, one / 2], micro_batch=first)
    loss = engine(inputs(1))
    refused(engine, "is marked as the first of an update, but gradients", loss, micro_batch=first)
    engine.backward(loss, micro_batch=last)
    engine.step()
    assert engine.global_steps == 1
    counted = engine_of(tower(), 2, accumulation=2)
    for number in range(2):
        counted.backward(counted(inputs(number)))
        counted.step()
    assert_states_equal(full_masters(engine), full_masters(counted))
    for number in range(2):  # no call marks the boundary: steps are counted, from here
        engine.backward(engine(inputs(number)))
        engine.step()
        assert engine.global_steps == 1 + number


class Counted:
    """Counts what the ranks ask each other about gathers, and the gathers."""

    def __init__(self, engine: Any) -> None:
        self.requested = self.gathered = 0
        agreement, transport = engine._runtime.agreement, engine._runtime.buckets[0].group.gather
        collect, all_gather = agreement.collect, transport.all_gather

        def counted_collect(*arguments: Any, **more: Any) -> Any:
            self.requested += 1
            return collect(*arguments, **more)

        def counted_gather(*arguments: Any, **more: Any) -> Any:
            self.gathered += 1
            return all_gather(*arguments, **more)

        agreement.collect, transport.all_gather = counted_collect, counted_gather

    def take(self) -> tuple[int, int]:
        """Both numbers since the last call."""
        taken = self.requested, self.gathered
        self.requested = self.gathered = 0
        return taken


def parts_keep_their_orders() -> None:
    """Parts that take turns follow their own orders, and what each kept stays until its own backward is over."""
    engine = chain_engine(3, **NOTHING_KEPT)
    counted = Counted(engine)
    for update in range(3):
        run_update(engine, update, shuffled(5))
        requested, gathered = counted.take()
    assert requested == 0 and gathered > 0, (requested, gathered)
    # Kept: nothing is gathered for a backward, whatever backwards of other forwards come before it.
    model = tower()
    engine = engine_of(model, 3, accumulation=3, zero={"stage3_param_persistence_threshold": 0})
    counted = Counted(engine)
    for update in range(2):
        losses = [engine(inputs(update, number, rank())) for number in range(3)]
        _, forwards = counted.take()
        for number, loss in enumerate(losses):
            engine.backward(loss, micro_batch=MicroBatch(number, is_first=number == 0, is_last=number == 2))
            assert counted.take()[1] == 0
            kept = [bucket.is_kept for bucket in engine._runtime.buckets if bucket.is_sharded]
            assert any(kept) is (number < 2)
        engine.step()
        counted.take()
        assert forwards == len(kept)


def parts_without_an_engine() -> None:
    """A part that is called directly announces its backward, so that the user's own ``backward()`` knows its order."""
    engine, reference = chain_engine(3, **NOTHING_KEPT), chain_engine(1)
    counted = Counted(engine)
    for update in range(3):
        for each in (engine, reference):
            each.set_gradient_accumulation_boundary(True)
            for part in (0, 2):
                counted.take()
                each.module.parts[part](inputs(update, part, rank()).double()).square().mean().backward()
                assert each is reference or update == 0 or counted.take()[0] == 0
            each.step()
    assert_states_equal(full_masters(engine), full_masters(reference), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("check", [parts_keep_their_orders, parts_without_an_engine])
def test_parts(check: Any) -> None:
    run_ranks(check, 2)
