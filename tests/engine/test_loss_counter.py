"""engine.backward(sum, count=tokens): any split of the same samples gives the update of plain torch."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.engine.loss_counter import mean_of_sum
from deepspeed.errors import CallOrderError, DeepSpeedConfigError, DivergenceError
from tests.ecosystem.support import needs_transformers
from tests.engine.support import engine_of, rank
from tests.harness import assert_states_equal, on_ranks
from tests.zero.reading import full_masters

SAMPLES, LENGTH, WIDTH, STEPS = 12, 7, 6, 3


def _model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, 5))


def _batch(step):
    """Inputs, labels and which tokens count: each sample has another number, one has none."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator)
    labels = torch.randint(0, 5, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH, (SAMPLES,), generator=generator)
    lengths[step % SAMPLES] = 0
    labels[torch.arange(LENGTH) >= lengths[:, None]] = -100
    return x, labels


def _sum(model, x, labels):
    logits = model(x).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _plain(clipping):
    model = _model()
    optimizer = _sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        total, count = _sum(model, *_batch(step))
        (total / count).backward()
        if clipping:
            nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
    return dict(model.named_parameters())


def _train(stage, accumulation, clipping=0.0, cuts=None, **config):
    """Trains on this rank's part, cut into micro-batches of any sizes."""
    engine = engine_of(_model(), stage, optimizer=_sgd, accumulation=accumulation, gradient_clipping=clipping, **config)
    for step in range(STEPS):
        x, labels = _batch(step)
        x, labels = (part.tensor_split(dist.get_world_size())[rank()] for part in (x, labels))
        for micro in range(accumulation):
            mine = (part.tensor_split(cuts or accumulation)[micro] for part in (x, labels))
            total, count = _sum(engine, *mine)
            reported = engine.backward(total, count=count if micro else np.int64(count.item()))
            torch.testing.assert_close(reported, total / count.clamp(min=1))
            engine.step()
    return engine


@on_ranks(1, 2)
def test_any_split_of_the_samples_gives_one_update():
    for clipping in (0.0, 0.05):
        plain = _plain(clipping)
        for stage, accumulation, cuts in ((0, 1, None), (1, 3, None), (2, 2, [1]), (3, 2, [4])):
            found = full_masters(_train(stage, accumulation, clipping, cuts))
            assert_states_equal(found, plain, rtol=1e-5, atol=1e-6)
    sums = _train(2, 3, fp16={"enabled": True, "initial_scale_power": 4, "auto_cast": True})
    assert sums.skipped_steps == 0
    assert_states_equal(full_masters(sums), _plain(0.0), rtol=2e-2, atol=4e-3)


@on_ranks(1)
def test_misuse_is_named():
    engine = engine_of(_model(), 1, accumulation=2)
    x, labels = _batch(0)
    engine.backward(_sum(engine, x, labels)[0], count=5)
    engine.step()
    with pytest.raises(CallOrderError, match="some losses since the last update have a count"):
        engine.backward(_sum(engine, x, labels)[0])
    engine.zero_grad()
    engine.backward(_sum(engine, x, labels)[0] / 5)
    with pytest.raises(DeepSpeedConfigError, match="count=-1"):
        engine_of(_model(), 1).backward(_sum(engine, x, labels)[0], count=-1)
    with pytest.raises(DeepSpeedConfigError, match="gradients and count"):
        engine.backward(engine(x), gradients=torch.ones(SAMPLES, LENGTH, 5), count=1)


@on_ranks(1)
def test_losses_with_and_without_a_count_are_not_mixed():
    """A loss without a count next to one with a count, by whichever call."""
    x, labels = _batch(0)
    for stage in (0, 3):
        engine = engine_of(_model(), stage, accumulation=2)
        without = {
            "the program's own backward": lambda engine=engine: (_sum(engine, x, labels)[0] / 5).backward(),
            "gradients": lambda engine=engine: engine.backward(engine(x), gradients=torch.ones(SAMPLES, LENGTH, 5)),
        }
        for backward in without.values():
            engine.backward(_sum(engine, x, labels)[0], count=5)
            with pytest.raises(CallOrderError, match="some losses since the last update have a count"):
                backward()
            engine.zero_grad()
            backward()
            with pytest.raises(CallOrderError, match="some losses since the last update have a count"):
                engine.backward(_sum(engine, x, labels)[0], count=5)
            engine.zero_grad()
        engine.backward(_sum(engine, x, labels)[0], count=5)
        inputs = x.clone().requires_grad_()
        torch.autograd.grad(engine(inputs).sum(), inputs)  # leaves no gradient in a parameter
        engine.backward(_sum(engine, x, labels)[0], count=5)


@on_ranks(2)
def test_ranks_that_disagree_on_a_count_are_named():
    x, labels = _batch(0)
    engine = engine_of(_model(), 1)
    for _ in range(2):  # the first counted loss gathers; later ones meet in the update
        engine.backward(_sum(engine, x, labels)[0], count=5)
        engine.step()
    engine.backward(_sum(engine, x, labels)[0], **({"count": 5} if dist.get_rank() == 0 else {}))
    with pytest.raises(DivergenceError, match="found that rank 0 gave one since the last update and rank 1 did not"):
        engine.step()


@on_ranks(2)
def test_a_bad_count_of_one_rank_is_an_error_on_every_rank():
    """A count that is none on rank 1 alone; each time, the first loss and a later one."""
    x, labels = _batch(0)
    for bad in (math.nan, torch.tensor(math.nan), torch.tensor(math.inf), -3, torch.tensor(-1.0)):
        engine = engine_of(_model(), 2, accumulation=2)
        count = bad if dist.get_rank() else 5
        words = rf"count={float(bad):g}\) on rank 1: expected the number of tokens"
        with pytest.raises(DeepSpeedConfigError, match=words):
            engine.backward(_sum(engine, x, labels)[0], count=count)
        for first in (5, 5, count):
            engine.backward(_sum(engine, x, labels)[0], count=first)
            engine.step()
        engine.backward(_sum(engine, x, labels)[0], count=5)
        with pytest.raises(DeepSpeedConfigError, match=words):
            engine.step()
        engine.zero_grad()
        for _ in range(2):
            engine.backward(_sum(engine, x, labels)[0], count=5)
            engine.step()
        assert all(value.isfinite().all() for value in full_masters(engine).values())


@on_ranks(2)
def test_a_rank_that_alone_counts_its_first_loss_raises():
    x, labels = _batch(0)
    engine = engine_of(_model(), 1)
    with pytest.raises(DivergenceError) as caught:
        engine.backward(_sum(engine, x, labels)[0], **({"count": 5} if dist.get_rank() == 0 else {}))
        engine.step()
    assert str(caught.value).startswith(
        "ranks made different calls and wait for each other: rank 0 waits for the token counts of the first losses "
        "(engine.backward(loss, count=...)); rank 1 waits for the reduction"
    )
    assert str(caught.value).endswith("Pass count on every rank, 0 where a rank has no tokens, or on none")


@on_ranks(1)
def test_the_power_of_two_follows_the_tokens_of_the_update_before():
    engine, found = engine_of(_model(), 2), []
    for tokens in (5, 70, 70):
        engine.backward(_sum(engine, *_batch(0))[0], count=tokens)
        found.append(engine._train_step.counts._scale)
        engine.step()
    assert found == [4.0, 4.0, 64.0]


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("fails")


def _my_part(step):
    return [part.tensor_split(dist.get_world_size())[rank()] for part in _batch(step)]


def _abandon(engine, way, folder):
    """One backward whose gradients are thrown away."""
    total, count = _sum(engine, *_my_part(2))
    if way == "an exception":
        with pytest.raises(KeyError, match="fails"):
            engine.backward(_Failing.apply(total), count=count)
        return
    engine.backward(total, count=count)
    if way == "optimizer.zero_grad":
        engine.optimizer.zero_grad()
    elif way == "load_checkpoint":
        engine.load_checkpoint(folder)


@on_ranks(2)
def test_tokens_go_where_their_gradients_go(folder):
    plain = _plain(0.0)
    for stage in (1, 3):
        for way in ("an exception", "optimizer.zero_grad", "load_checkpoint", "optimizer.step"):
            engine = engine_of(_model(), stage, optimizer=_sgd)
            if way == "load_checkpoint":
                engine.save_checkpoint(folder)
            if way != "optimizer.step":
                _abandon(engine, way, folder)
            for step in range(STEPS):
                total, count = _sum(engine, *_my_part(step))
                engine.backward(total, count=count)
                (engine.optimizer if way == "optimizer.step" else engine).step()
            assert_states_equal(full_masters(engine), plain, rtol=1e-5, atol=1e-6)


AXES = [
    {"sequence_parallel_size": 2},
    {"sequence_parallel_size": 2, "sequence_parallel": {"loss": "own_share"}},
    {"tensor_parallel": {"autotp_size": 2}},
]


@needs_transformers
@on_ranks(2)
def test_sequence_and_tensor_ranks_give_the_same_update():
    """Each rank sums over its own part of the sequences; ranks that share layers all have the same sum."""
    import deepspeed
    from tests.parallel.sequence.llama import llama, padded_batch
    from tests.parallel.sequence.net import cut

    whole = padded_batch(3)

    def loss_of(model, inputs):
        labels = inputs["shift_labels"]
        given = {name: value for name, value in inputs.items() if name != "shift_labels"}
        logits = model(**given, use_cache=False).logits.flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum"), (labels != -100).sum()

    for axes in AXES:
        expected, model = llama(), llama()
        total, count = loss_of(expected, whole)
        (total / count).backward()
        _sgd(expected).step()
        config = {
            "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1}, **axes,
        }  # fmt: skip
        engine = deepspeed.initialize(model=model, optimizer=_sgd(model), config=config)[0]
        mine = cut(whole, rank(), 2) if "sequence_parallel_size" in axes else whole
        total, count = loss_of(engine, mine)
        engine.backward(total, count=count)
        engine.step()
        for name, value in engine.iter_full("fp32"):
            torch.testing.assert_close(value, expected.get_parameter(name).detach(), rtol=1e-5, atol=1e-6, msg=name)
        engine.destroy()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_reported_mean_is_right_for_large_and_for_fractional_counts(dtype: torch.dtype) -> None:
    total = torch.tensor(30000.0, dtype=dtype)
    for count in (torch.tensor(100_000), 100_000.0):  # above the largest number of fp16
        mean = mean_of_sum(total, count)
        assert mean.dtype == dtype and math.isclose(mean.item(), 0.3, rel_tol=1e-3)
    for count in (torch.tensor(0.5), 0.5):  # a sum of weights
        assert math.isclose(mean_of_sum(total / 1000, count).item(), 60.0, rel_tol=1e-3)
    for count in (torch.tensor(0), 0.0):
        assert mean_of_sum(total * 0, count).item() == 0.0
