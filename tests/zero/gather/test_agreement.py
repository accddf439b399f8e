"""Ranks that use other parameters than the others: served, or an error on every rank."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.comm.host.gloo import GlooTransport
from deepspeed.errors import DivergenceError
from deepspeed.utils import safe_get_full_fp32_param
from tests.ecosystem.support import needs_transformers
from tests.engine.support import WIDTH, engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.cases import LIMITS, Plain, seeded
from tests.harness.toy_models import Layer, RoutedTower, Tower
from tests.zero.reading import full_masters

# Ranks that run different units at stage 3: an error on every rank within seconds, never a hang, never garbage.


LIMIT = 60.0  # seconds; without the check of the order both ranks would wait for the time limit of their group


ROUTE_LIMITS = {
    "nothing ahead": {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
    "everything ahead": {"stage3_max_reuse_distance": 0},
    "kept for backward": {},
}


def _diverge(limits, usual, strange, own_backward):
    """Three steps together, then the last rank takes another route. Returns how long the error took, and its text."""
    zero = {"stage3_param_persistence_threshold": 0, **ROUTE_LIMITS[limits], "agreement": "error"}
    engine = engine_of(seeded(RoutedTower), 3, zero=zero)
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


@pytest.mark.parametrize("limits", ROUTE_LIMITS)
@pytest.mark.parametrize("routes", ["another unit at the end", "another unit at the start"])
def test_every_rank_raises_within_seconds(limits, routes):
    usual, strange = ROUTES[routes]
    for seconds, text in run_ranks(_diverge, 2, limits, usual, strange, False):
        assert seconds < LIMIT, f"{routes}, {limits}: {seconds:.1f} s"
        assert "rank 0" in text and "rank 1" in text, text


@pytest.mark.parametrize("limits", ROUTE_LIMITS)
def test_a_unit_more_on_one_of_three_ranks(limits):
    usual, strange = ROUTES["one unit more"]
    for seconds, text in run_ranks(_diverge, 3, limits, usual, strange, True):
        assert seconds < LIMIT, f"{limits}: {seconds:.1f} s"
        assert "rank" in text


def _own_route(limits, usual, strange):
    """From step 2 on rank 0 takes its own route, also to units outside the order; the reference does the same."""
    zero = {"stage3_param_persistence_threshold": 0, **ROUTE_LIMITS[limits]}
    engine, plain = engine_of(seeded(RoutedTower), 3, zero=zero), Plain(RoutedTower)
    for step in range(5):
        routes = [strange if step >= 2 else usual, usual]
        engine.backward(engine(inputs(step, rank()), routes[rank()]))
        engine.step()
        plain.step(lambda model, of, step=step, routes=routes: model(inputs(step, of), routes[of]))
    plain.assert_masters(engine, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limits", ROUTE_LIMITS)
@pytest.mark.parametrize("routes", ROUTES)
def test_one_rank_may_take_its_own_route(limits, routes):
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
    zero = {"stage3_param_persistence_threshold": 0, "agreement": "serve", **ROUTE_LIMITS[limits]} if stage == 3 else {}
    engine = engine_of(seeded(RoutedTower), stage, zero=zero, gradient_clipping=0.5)
    plain = Plain(RoutedTower)
    chance = random.Random(seed)  # all ranks know all routes, for the reference
    for step in range(8):
        routes = [[chance.randrange(4) for _ in range(chance.randrange(1, 5))] for _ in range(ranks)]
        if step in (3, 4):
            routes = [routes[0]] * ranks
        loss = engine(inputs(step, rank()), routes[rank()])
        loss.backward() if step % 2 else engine.backward(loss)
        engine.step()
        plain.step(lambda model, of, step=step, routes=routes: model(inputs(step, of), routes[of]), clip=0.5)
        with torch.no_grad():
            mine = engine.eval()(inputs(step, rank()), routes[rank() - 1])
            engine.train()
            expected = plain.model(inputs(step, rank()), routes[rank() - 1])
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    plain.assert_masters(engine, rtol=1e-4, atol=1e-5)


def _late(seconds):
    engine = engine_of(seeded(RoutedTower), 3)
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
    engine, plain = engine_of(seeded(RoutedTower), 3), Plain(RoutedTower)
    for step, route in enumerate([[0, 1, 2], [0, 1, 2], [3, 1, 0], [0, 1, 2], [3, 3, 2], [0, 1, 2, 3]]):
        engine.backward(engine(inputs(step), route))
        engine.step()
        plain.step(lambda model, of, step=step, route=route: model(inputs(step), route))
    plain.assert_masters(engine)


@on_ranks(2)
def test_calls_with_different_numbers_of_numbers():
    """A listing that tells something of every parameter, against a call for one of them."""
    engine = engine_of(RoutedTower(), 3, zero=ROUTE_LIMITS["nothing ahead"])
    with pytest.raises(DivergenceError, match=r"rank 0: iter_full\('param'\); rank 1: safe_get_full_fp32_param of "):
        if rank() == 0:
            next(engine.iter_full("param"))
        else:
            safe_get_full_fp32_param(engine.layers[0].rise.weight)


@on_ranks(2)
def test_one_rank_evaluates_once_more():
    """Its gathers match the others' training forward; then one goes backward and the other forward, in known orders."""
    torch.manual_seed(3)
    engine = engine_of(
        RoutedTower(), 3, zero={"stage3_param_persistence_threshold": 0, **ROUTE_LIMITS["everything ahead"]}
    )
    with pytest.raises(DivergenceError, match="rank 0 waits for the gather of .*; rank 1 waits for the gather of "):
        for step in range(4):
            for _ in range(2 if step == 3 and rank() == 1 else 1):
                with torch.no_grad():
                    engine(inputs(step, rank()), range(4))
            engine.backward(engine(inputs(step, rank()), range(4)))
            engine.step()


# Ranks that use different parameters inside the same units: legal at every stage, as under DDP's unused parameters.


class Chooser(nn.Module):
    """One unit with two linears, of which a forward uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, choice):
        if choice != 1:
            x = x + torch.tanh(self.even(x))
        if choice != 0:
            x = x + torch.tanh(self.odd(x))
        return x


class ChooserTower(nn.Module):
    """Units whose inner choice is made per rank, so that buckets are complete at different times on each."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Chooser() for _ in range(depth))

    def forward(self, x, choices):
        for layer, choice in zip(self.layers, choices, strict=True):
            x = layer(x, choice)
        return x.square().mean()


def _choices(step, of_rank):
    """Both in the first step, in which the order of reductions is learned, and on rank 0 in every second one."""
    if step == 0 or (of_rank == 0 and step % 2):
        return [2] * 8
    generator = torch.Generator().manual_seed(step * 31 + of_rank)
    return torch.randint(3, (8,), generator=generator).tolist()


def _loss(model, step, of_rank):
    return model(inputs(step, of_rank), _choices(step, of_rank))


def _train(stage, zero):
    engine, plain = engine_of(seeded(ChooserTower), stage, zero=zero), Plain(ChooserTower)
    for step in range(5):
        engine.backward(_loss(engine, step, rank()))
        engine.step()
        plain.step(lambda model, of, step=step: _loss(model, step, of))
    plain.assert_masters(engine, rtol=1e-4, atol=1e-5)


NOTHING_AHEAD = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
    "reduce_bucket_size": 200,
    "overlap_comm": True,
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_inner_choices_differ_between_ranks(stage):
    """A rank that has not used a parameter holds its bucket back until the end of backward; nobody may wait for it."""
    for ranks in (2, 3):
        run_ranks(_train, ranks, stage, NOTHING_AHEAD)


def test_with_default_limits():
    run_ranks(_train, 2, 3, {})


class RecomputedTower(ChooserTower):
    """The tower with every layer under a checkpoint of the given kind; None: without."""

    def __init__(self, reentrant) -> None:
        super().__init__(4)
        self.reentrant = reentrant

    def forward(self, x, choices):
        x = x.requires_grad_()  # otherwise whether the first layer's weights are needed depends on the choice
        for layer, choice in zip(self.layers, choices, strict=False):
            if self.reentrant is not None:
                x = checkpoint(layer, x, choice, use_reentrant=self.reentrant)
            else:
                x = layer(x, choice)
        return x.square().mean()


def _several_forwards(reentrant, zero):
    """All forwards of an update before its backwards, last first, as the schedules of pipelines run them."""

    def both(model, of, step):
        return sum(_loss(model, 2 * step + micro, of) for micro in range(2)) / 2

    def make():
        return RecomputedTower(reentrant)

    engine, plain = engine_of(seeded(make), 3, zero=zero, accumulation=2), Plain(make)
    for step in range(5):
        losses = [_loss(engine, 2 * step + micro, rank()) for micro in range(2)]
        for loss in reversed(losses):
            engine.backward(loss)
            engine.step()
        plain.step(lambda model, of, step=step: both(model, of, step))
    plain.assert_masters(engine, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True, None])
def test_recomputed_forwards_that_wait_for_their_backwards_together(reentrant):
    """A rank with every gradient of a bucket may not free what another rank, which lacks one, keeps gathered."""
    for ranks, zero in ((2, {"stage3_param_persistence_threshold": 0}), (3, NOTHING_AHEAD)):
        run_ranks(_several_forwards, ranks, reentrant, zero)


class LeavingOut(Tower):
    """Passes over one of its units on request."""

    def forward(self, x, leaves_out):
        x = self.first(x.to(self.first.bias.dtype))
        for index, layer in enumerate(self.layers):
            if not (leaves_out and index == 2):
                x = layer(x)
        return self.last(x).float().square().mean()


def _leave_out_early(stage, settles):
    """In the first of two micro-batches rank 1 has no gradient in a whole bucket; in the second everybody has."""
    torch.manual_seed(3)
    engine = engine_of(LeavingOut(), stage, accumulation=2, bf16={"enabled": True}, zero={"reduce_bucket_size": 200})
    for step in range(2):
        for micro in range(2):
            if settles:  # no backward is the last one, so that the update reduces the sums
                engine.set_gradient_accumulation_boundary(False)
            engine.backward(engine(inputs(step, micro, rank()), rank() == 1 and micro == 0))
            if settles:
                engine.set_gradient_accumulation_boundary(micro == 1)
            engine.step()
    return full_masters(engine)


def test_a_bucket_without_a_sum_is_sent_as_those_with_one():
    """Sums are fp32 and gradients bf16: ranks that sent different ones killed each other."""
    truth = run_ranks(_leave_out_early, 2, 2, False)[0]
    for stage in (0, 1):
        assert_states_equal(run_ranks(_leave_out_early, 2, stage, False)[0], truth, rtol=1e-2, atol=1e-3)
    assert_states_equal(run_ranks(_leave_out_early, 2, 1, True)[0], truth, rtol=1e-2, atol=1e-3)


@on_ranks(2)
def test_one_order_of_gathers_and_reductions_once_ranks_differ():
    """As if the backend needed one order; what is sent while the backward runs."""
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooTransport, "needs_one_order", True)
        engine = engine_of(ChooserTower(), 3, zero=NOTHING_AHEAD)
    reducer = engine._runtime.reducer
    sent, end = [], reducer.end

    def counting_end(backward):
        sent.append(backward.reductions.cursor)
        end(backward)

    reducer.end = counting_end
    even = [2] * 8
    for step, choices in enumerate([even, even, [rank()] * 8, even]):
        engine.backward(engine(inputs(step, rank()), choices))
        engine.step()
    assert sent[0] == 0 and sent[1] > 0 and sent[3] == 0, sent


# Towers that only some ranks use, since the others have text only: trained at stage 3 as by plain torch.


Images = Callable[[int, int], bool]
"""``images(step, rank)``: whether the batch of a rank has images."""


class Seeing(nn.Module):
    """A decoder of some layers with a tower, whose result is added where there are images."""

    def __init__(self, tower: str = "trained") -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.tower = nn.Sequential(Layer(), Layer())
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11)
        self.is_frozen = tower == "frozen"
        self.tower.requires_grad_(not self.is_frozen)

    def forward(self, tokens, images):
        x = self.words(tokens)
        if images is not None:
            with torch.set_grad_enabled(not self.is_frozen):
                seen = self.tower(images)
            x = x + seen.unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _own_loss(images: Images) -> Callable[[nn.Module, int, int], torch.Tensor]:
    def loss(model, step, of):
        made = torch.Generator().manual_seed(50 * step + of)
        tokens, pixels = torch.randint(11, (2, 5), generator=made), torch.randn(2, WIDTH, generator=made)
        return model(tokens, pixels if images(step, of) else None)

    return loss


def _only_rank_0(step: int, of: int) -> bool:
    return of == 0 and step != 3


def _late_unused_towers(step: int, of: int) -> bool:
    return of == 0 and step >= 2


def _in_turn(step: int, of: int) -> bool:
    return step % 2 == of


def _compare(make: Callable[[], nn.Module], loss: Any, zero: dict[str, Any]) -> None:
    engine, plain = engine_of(seeded(make), 3, zero=zero), Plain(make)
    for step in range(5):
        engine.backward(loss(engine, step, rank()))
        engine.step()
        plain.step(lambda model, of, step=step: loss(model, step, of))
    plain.assert_masters(engine, rtol=1e-4, atol=1e-5)


def _own(cases: list[tuple[str, Images, str]]) -> None:
    for tower, images, agreement in cases:
        for limits in LIMITS.values():
            _compare(lambda kind=tower: Seeing(kind), _own_loss(images), {**limits, "agreement": agreement})


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_tower_that_some_ranks_use(ranks):
    run_ranks(_own, ranks, [("trained", _only_rank_0, "adapt"), ("frozen", _in_turn, "adapt")])


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_tower_that_no_rank_uses_at_first(ranks):
    cases = [(tower, _late_unused_towers, how) for tower in ("trained", "frozen") for how in ("adapt", "serve")]
    run_ranks(_own, ranks, cases)


@on_ranks(2)
def test_what_is_not_served_names_the_key():
    for images in (_only_rank_0, _late_unused_towers):
        engine = engine_of(Seeing(), 3, zero={**LIMITS["default"], "agreement": "error"})
        with pytest.raises(DivergenceError, match='[Ss]et zero_optimization.agreement to "serve"'):
            for step in range(5):
                engine.backward(_own_loss(images)(engine, step, rank()))
                engine.step()


def _llava() -> nn.Module:
    import transformers

    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=39)
    return transformers.LlavaForConditionalGeneration(config).train()


def _llava_loss(images: Images) -> Callable[[nn.Module, int, int], torch.Tensor]:
    def loss(model, step, of):
        made = torch.Generator().manual_seed(50 * step + of)
        tokens = torch.randint(3, 36, (2, 13), generator=made)
        batch = {"labels": tokens.clone(), "use_cache": False}
        if images(step, of):
            tokens[:, 4:8] = 39
            batch["pixel_values"] = torch.randn(2, 3, 8, 8, generator=made)
        return model(input_ids=tokens, **batch).loss

    return loss


@needs_transformers
@on_ranks(2, pytest.param(3, marks=pytest.mark.slow))
def test_llava_with_text_only_batches_on_some_ranks() -> None:
    for images in (_only_rank_0, _late_unused_towers):
        for limits in LIMITS.values():
            _compare(_llava, _llava_loss(images), limits)
