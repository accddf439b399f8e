"""Ranks that run different units at stage 3: an error on every rank within seconds, never a hang, never garbage."""

import random
import time

import pytest
import torch
import torch.distributed as dist

from deepspeed.errors import DivergenceError
from deepspeed.utils import safe_get_full_fp32_param
from tests.engine.support import adamw, engine_of, inputs, rank
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import RoutedTower
from tests.zero.reading import full_masters

LIMIT = 60.0  # seconds; without the check of the order both ranks would wait for the time limit of their group


LIMITS = {
    "nothing ahead": {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
    "everything ahead": {"stage3_max_reuse_distance": 0},
    "kept for backward": {},
}


def _diverge(limits, usual, strange, own_backward):
    """Three steps together, then the last rank takes another route. Returns how long the error took, and its text."""
    torch.manual_seed(3)
    engine = engine_of(RoutedTower(), 3, zero={"stage3_param_persistence_threshold": 0, **LIMITS[limits]})
    for step in range(3):
        engine.backward(engine(inputs(step, rank()), usual))
        engine.step()
    before = {name: value.norm().item() for name, value in full_masters(engine).items()}
    odd_one = rank() == dist.get_world_size() - 1
    dist.barrier()
    started = time.monotonic()
    with pytest.raises(DivergenceError) as caught:
        for step in range(3, 6):
            loss = engine(inputs(step, rank()), strange if odd_one else usual)
            loss.backward() if own_backward else engine.backward(loss)
            engine.step()
    seconds = time.monotonic() - started
    mine = {m.bucket.layout.tiles[0].name: m.flat.isfinite().all().item() for m in engine._runtime.masters}
    assert all(mine.values()) and before
    return seconds, str(caught.value)


ROUTES = {
    "another unit at the end": ([0, 1, 2], [0, 1, 3]),
    "another unit at the start": ([1, 2, 3], [0, 2, 3]),
    "one unit less": ([0, 1, 2, 3], [0, 1, 3]),
    "one unit more": ([0, 1, 2], [0, 1, 2, 3]),
    "another order": ([0, 1, 2, 3], [0, 2, 1, 3]),
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("routes", ["another unit at the end", "another unit at the start"])
def test_every_rank_raises_within_seconds(limits, routes):
    usual, strange = ROUTES[routes]
    for seconds, text in run_ranks(_diverge, 2, limits, usual, strange, False):
        assert seconds < LIMIT, f"{routes}, {limits}: {seconds:.1f} s"
        assert "rank 0" in text and "rank 1" in text, text


@pytest.mark.parametrize("limits", LIMITS)
def test_a_unit_more_on_one_of_three_ranks(limits):
    usual, strange = ROUTES["one unit more"]
    for seconds, text in run_ranks(_diverge, 3, limits, usual, strange, True):
        assert seconds < LIMIT, f"{limits}: {seconds:.1f} s"
        assert "rank" in text


def _own_route(limits, usual, strange):
    """From step 2 on rank 0 takes its own route through units of the agreed order; the reference does the same."""
    torch.manual_seed(3)
    engine = engine_of(RoutedTower(), 3, zero={"stage3_param_persistence_threshold": 0, **LIMITS[limits]})
    torch.manual_seed(3)
    plain = RoutedTower()
    optimizer = adamw(plain)
    for step in range(5):
        routes = [strange if step >= 2 else usual, usual]
        engine.backward(engine(inputs(step, rank()), routes[rank()]))
        engine.step()
        optimizer.zero_grad()
        for of_rank, route in enumerate(routes):
            (plain(inputs(step, of_rank), route) / 2).backward()
        optimizer.step()
    for name, value in full_masters(engine).items():
        torch.testing.assert_close(value, plain.get_parameter(name).data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("routes", ["one unit less", "another order"])
def test_one_rank_may_skip_or_swap_units_of_the_agreed_order(limits, routes):
    """It takes part in the gathers of what it skips, because the others rely on its slices."""
    run_ranks(_own_route, 2, limits, *ROUTES[routes])


@pytest.mark.parametrize(
    ("ranks", "stage", "limits"),
    [
        (2, 3, "everything ahead"),
        (3, 3, "nothing ahead"),
        (4, 3, "kept for backward"),
        (2, 1, "kept for backward"),
        (3, 2, "kept for backward"),
        pytest.param(2, 3, "kept for backward", marks=pytest.mark.slow),
        pytest.param(4, 3, "everything ahead", marks=pytest.mark.slow),
        pytest.param(3, 3, "kept for backward", marks=pytest.mark.slow),
    ],
)
@on_ranks(timeout=100)
def test_ranks_that_take_their_own_branches_may_be_served(ranks, stage, limits):
    """Every rank takes branches by its own data; the reference is plain torch, its gradients averaged over the ranks.

    What no rank has used has no gradient there (``None``), as under DDP with ``find_unused_parameters``.
    """
    seed = 10 * ranks + stage
    torch.manual_seed(3)
    zero = {"stage3_param_persistence_threshold": 0, "agreement": "serve", **LIMITS[limits]} if stage == 3 else {}
    engine = engine_of(RoutedTower(), stage, zero=zero, gradient_clipping=0.5)
    torch.manual_seed(3)
    plain = RoutedTower()
    optimizer = adamw(plain)
    ranks = dist.get_world_size()
    chance = random.Random(seed)  # all ranks know all routes, for the reference
    for step in range(8):
        routes = [[chance.randrange(4) for _ in range(chance.randrange(1, 5))] for _ in range(ranks)]
        if step in (3, 4):
            routes = [routes[0]] * ranks
        loss = engine(inputs(step, rank()), routes[rank()])
        loss.backward() if step % 2 else engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        for of_rank, route in enumerate(routes):
            (plain(inputs(step, of_rank), route) / ranks).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            mine = engine.eval()(inputs(step, rank()), routes[rank() - 1])
            engine.train()
            torch.testing.assert_close(mine, plain(inputs(step, rank()), routes[rank() - 1]), rtol=1e-4, atol=1e-5)
    for name, value in full_masters(engine).items():
        torch.testing.assert_close(value, plain.get_parameter(name).data, rtol=1e-4, atol=1e-5)


def _late(seconds):
    torch.manual_seed(3)
    engine = engine_of(RoutedTower(), 3)
    for step in range(4):
        if step == 2 and rank() == 1:
            time.sleep(seconds)
        loss = engine(inputs(step, rank()), [0, 1, 2, 3])
        if step == 3 and rank() == 0:
            time.sleep(1.0)
        engine.backward(loss)
        engine.step()
    return engine.global_steps


def test_being_late_is_no_error():
    assert run_ranks(_late, 2, 5.0) == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_twenty_seconds_late_is_no_error(ranks):
    assert run_ranks(_late, ranks, 20.0) == [4] * ranks


@on_ranks(2)
def test_all_ranks_may_change_their_route_together():
    """All ranks change their route at once: recorded again, and right."""
    torch.manual_seed(3)
    engine = engine_of(RoutedTower(), 3)
    torch.manual_seed(3)
    plain = RoutedTower()
    optimizer = adamw(plain)
    for step, route in enumerate([[0, 1, 2], [0, 1, 2], [3, 1, 0], [0, 1, 2], [3, 3, 2], [0, 1, 2, 3]]):
        engine.backward(engine(inputs(step), route))
        engine.step()
        optimizer.zero_grad()
        plain(inputs(step), route).backward()
        optimizer.step()
    for name, value in full_masters(engine).items():
        torch.testing.assert_close(value, plain.get_parameter(name).data, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_calls_with_different_numbers_of_numbers():
    """A listing that tells something of every parameter, against a call for one of them."""
    engine = engine_of(RoutedTower(), 3, zero=LIMITS["nothing ahead"])
    with pytest.raises(DivergenceError, match=r"rank 0: iter_full\('param'\); rank 1: safe_get_full_fp32_param of "):
        if rank() == 0:
            next(engine.iter_full("param"))
        else:
            safe_get_full_fp32_param(engine.layers[0].rise.weight)


@on_ranks(2)
def test_one_rank_evaluates_once_more():
    """Its gathers match the others' training forward; then one goes backward and the other forward, in known orders."""
    torch.manual_seed(3)
    engine = engine_of(RoutedTower(), 3, zero={"stage3_param_persistence_threshold": 0, **LIMITS["everything ahead"]})
    with pytest.raises(DivergenceError, match="rank 0 waits for the gather of .*; rank 1 waits for the gather of "):
        for step in range(4):
            for _ in range(2 if step == 3 and rank() == 1 else 1):
                with torch.no_grad():
                    engine(inputs(step, rank()), range(4))
            engine.backward(engine(inputs(step, rank()), range(4)))
            engine.step()
