"""Ranks that use different parameters inside the same units: legal at every stage, as under DDP's unused parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.comm.host.gloo import GlooTransport
from tests.engine.support import WIDTH, engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import Tower
from tests.zero.gather.beside_torch import weights_of_torch
from tests.zero.reading import full_masters


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
    torch.manual_seed(3)
    engine = engine_of(ChooserTower(), stage, zero=zero)
    for step in range(5):
        engine.backward(_loss(engine, step, rank()))
        engine.step()
    expected = weights_of_torch(ChooserTower, _loss, steps=5, ranks=dist.get_world_size())
    assert_states_equal(full_masters(engine), expected, rtol=1e-4, atol=1e-5)


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
    torch.manual_seed(3)
    engine = engine_of(RecomputedTower(reentrant), 3, zero=zero, accumulation=2)
    for step in range(5):
        losses = [_loss(engine, 2 * step + micro, rank()) for micro in range(2)]
        for loss in reversed(losses):
            engine.backward(loss)
            engine.step()
    expected = weights_of_torch(
        lambda: RecomputedTower(reentrant),
        lambda model, step, of: sum(_loss(model, 2 * step + micro, of) for micro in range(2)) / 2,
        steps=5,
        ranks=dist.get_world_size(),
    )
    assert_states_equal(full_masters(engine), expected, rtol=1e-4, atol=1e-5)


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
