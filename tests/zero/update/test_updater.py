"""The update of masters by a torch optimizer."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.errors import CallOrderError, DivergenceError, NonFiniteError
from deepspeed.precision.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.zero.gradient import gradients
from deepspeed.zero.gradient.gradient_sum import norm_from_squares, squared_norm
from deepspeed.zero.update.step_agreement import StepAgreement
from tests.harness import on_threads, run_ranks
from tests.harness.loopback import LoopbackTransport, run_threads
from tests.offload.training import config, make_engine, train_some
from tests.zero.alone import Rank, adamw, batch, rank_of, reference, stack

# The update (``zero.update.updater``), on ranks that are threads.


STAGES = [0, 1, 2, 3]
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


def losses(model: nn.Module, step: int, rank: int) -> list[torch.Tensor]:
    return [model(batch(step, rank))]


def train(rank: Rank, steps: int) -> list[float]:
    """Norms of some updates."""
    return [rank.step(*losses(rank.model, step, rank.transport.rank)) for step in range(steps)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_updates_are_those_of_plain_torch(stage: int, clip: float) -> None:
    def body(transport: LoopbackTransport) -> tuple[list[float], dict[str, torch.Tensor]]:
        rank = rank_of(transport, stage, clip_grad=clip)
        return train(rank, 3), rank.values()

    expected = reference(2, losses, 3, clip=clip)
    plain = stack()
    for number in range(2):
        (losses(plain, 0, number)[0] / 2).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]).item()
    for norms, found in run_threads(body, 2):
        torch.testing.assert_close(found, expected, **CLOSE)
        assert norms[0] == pytest.approx(norm, rel=1e-5)
        if clip:
            assert norm > clip


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_are_summed(stage: int) -> None:
    def both(model: nn.Module, step: int, rank: int) -> list[torch.Tensor]:
        return [model(batch(step, rank, micro)) / 2 for micro in range(2)]

    def body(transport: LoopbackTransport) -> dict[str, torch.Tensor]:
        rank = rank_of(transport, stage, micro_batches=2)
        for step in range(2):
            for index, loss in enumerate(both(rank.model, step, transport.rank)):
                rank.backward(loss, index)
            rank.optimizer.step()
        return rank.values()

    for found in run_threads(body, 2):
        torch.testing.assert_close(found, reference(2, both, 2), **CLOSE)


@pytest.mark.parametrize("stage", [0, 2])
@on_threads(2)
def test_a_gradient_that_is_not_finite_anywhere_skips_the_update_everywhere(
    transport: LoopbackTransport, stage: int
) -> None:
    rank = rank_of(transport, stage, skip_non_finite=True, max_skipped=2)
    train(rank, 1)
    before = rank.values()
    spoilt = math.inf if transport.rank == 1 else 1.0
    norm = rank.step(rank.model(batch(1, transport.rank)) * spoilt)
    assert not math.isfinite(norm) and rank.optimizer.overflow
    assert (rank.optimizer.steps, rank.optimizer.skipped_in_a_row) == (2, 1)
    assert all(torch.equal(value, before[name]) for name, value in rank.values().items())
    assert not rank.reducer.has_sums
    rank.step(rank.model(batch(2, transport.rank)))
    assert not rank.optimizer.overflow and rank.optimizer.skipped_in_a_row == 0
    rank.step(rank.model(batch(1, transport.rank)) * spoilt)
    with pytest.raises(NonFiniteError, match=r"2 steps in a row.*first in 'blocks.0.up.weight' \(slice of rank"):
        rank.step(rank.model(batch(1, transport.rank)) * spoilt)


def test_the_loss_scale_is_taken_out_and_follows_overflows() -> None:
    def body(transport: LoopbackTransport) -> dict[str, torch.Tensor]:
        rank = rank_of(transport, 2, loss_scaler=LossScaler(256.0), clip_grad=0.05)
        assert rank.optimizer.loss_scale == rank.optimizer.cur_scale == 256.0 and not rank.optimizer.dynamic_loss_scale
        for step in range(2):
            rank.step(rank.model(batch(step, transport.rank)) * rank.optimizer.loss_scale)
        return rank.values()

    for found in run_threads(body, 2):
        torch.testing.assert_close(found, reference(2, losses, 2, clip=0.05), **CLOSE)

    def dynamic(transport: LoopbackTransport) -> None:
        rank = rank_of(
            transport,
            1,
            loss_scaler=DynamicLossScaler(
                64.0, scale_window=2, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False
            ),
        )
        before = rank.optimizer.loss_scale
        rank.step(rank.model(batch(0)) * math.inf)
        assert rank.optimizer.loss_scale == before / 2 and rank.optimizer.overflow
        assert (rank.optimizer.cur_iter, rank.optimizer.last_overflow_iter) == (1, 0)
        assert (rank.optimizer.scale_window, rank.optimizer.scale_factor) == (2, 2.0)
        rank.optimizer.override_loss_scale(8.0)
        assert rank.optimizer.loss_scale == 8.0

    run_threads(dynamic, 2)


def test_an_overflow_at_the_agreement_is_every_ranks_own_matter_without_skipping() -> None:
    def body(transport: LoopbackTransport) -> bool:
        rank = rank_of(transport, 1)
        rank.step(rank.model(batch(0)) * math.nan)
        assert not rank.optimizer.overflow
        return any(bool(value.isnan().any()) for value in rank.values().values())

    assert run_threads(body, 2) == [True, True]


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_without_a_gradient_on_any_rank_stay(stage: int) -> None:
    skips = [[], [1], [1, 2]]

    def some(model: nn.Module, step: int, rank: int) -> list[torch.Tensor]:
        return [model(batch(step, rank), skip=skips[step])]

    def body(transport: LoopbackTransport) -> dict[str, torch.Tensor]:
        rank = rank_of(transport, stage, joined=10**6)  # used and unused ones share buckets
        for step in range(3):
            rank.step(*some(rank.model, step, transport.rank))
        return rank.values()

    expected = reference(2, some, 3)
    for found in run_threads(body, 2):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_on_one_rank_updates_the_parameter_on_all(stage: int) -> None:
    def own(model: nn.Module, step: int, rank: int) -> list[torch.Tensor]:
        return [model(batch(step, rank), skip=[1] if rank == 0 else [])]

    def body(transport: LoopbackTransport) -> dict[str, torch.Tensor]:
        rank = rank_of(transport, stage)
        for step in range(2):
            rank.step(*own(rank.model, step, transport.rank))
        return rank.values()

    for found in run_threads(body, 2):
        torch.testing.assert_close(found, reference(2, own, 2), **CLOSE)


@on_threads(2)
def test_unused_parameters_may_be_refused(transport: LoopbackTransport) -> None:
    rank = rank_of(transport, 1, policy={"allow_unused": False})
    train(rank, 1)
    before = rank.values()
    with pytest.raises(CallOrderError, match=r"4 parameter\(s\) got no gradient on any rank: blocks.1.up.weight"):
        rank.step(rank.model(batch(1), skip=[1]))
    assert all(torch.equal(value, before[name]) for name, value in rank.values().items())
    train(rank, 1)


@on_threads(2)
def test_ranks_with_other_orders_or_written_gradients_are_distinguished(transport: LoopbackTransport) -> None:
    rank = rank_of(transport, 1)
    rank.backward(rank.model(batch(0)))
    if transport.rank:
        rank.runtime.agreement.end_pass([7])
    with pytest.raises(DivergenceError, match="different numbers of forwards and backwards"):
        rank.optimizer.step()
    rank = rank_of(transport, 1)
    rank.backward(rank.model(batch(0)))
    if transport.rank:
        rank.reducer.buckets[1].note_write(0, by_all=True)
    with pytest.raises(DivergenceError, match=r"ranks \[0\] have done so with others"):
        rank.optimizer.step()


def test_a_closure_is_evaluated_before_the_update_and_returned() -> None:
    def body(transport: LoopbackTransport) -> dict[str, torch.Tensor]:
        rank = rank_of(transport, 2)
        for step in range(2):

            def closure(step: int = step) -> str:
                assert torch.is_grad_enabled()
                rank.backward(rank.model(batch(step, transport.rank)))
                return f"loss {step}"

            assert rank.optimizer.step(closure) == f"loss {step}"
        return rank.values()

    for found in run_threads(body, 2):
        torch.testing.assert_close(found, reference(2, losses, 2), **CLOSE)


@pytest.mark.parametrize("stage", [1, 3])
@on_threads(2)
def test_a_state_dict_brings_a_run_back(transport: LoopbackTransport, stage: int) -> None:
    rank = rank_of(transport, stage)
    train(rank, 2)
    saved = copy.deepcopy(rank.optimizer.state_dict())  # the torch optimizer gives live tensors
    at = rank.values()
    groups = rank.optimizer.param_groups
    after = (rank.step(rank.model(batch(5, transport.rank))), rank.values())
    rank.optimizer.load_state_dict(saved)
    assert rank.optimizer.steps == 2
    assert all(torch.equal(value, at[name]) for name, value in rank.values().items())
    assert rank.optimizer.param_groups is groups
    again = (rank.step(rank.model(batch(5, transport.rank))), rank.values())
    assert after[0] == again[0] and all(torch.equal(again[1][name], value) for name, value in after[1].items())


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_threads(2)
def test_a_state_dict_from_before_runs_were_cut_brings_the_run_back(transport: LoopbackTransport, stage: int) -> None:
    """The second update cuts runs, since the first block has no gradient in it."""

    def two_updates(rank: Rank) -> tuple[float, float, dict[str, torch.Tensor]]:
        first = rank.step(rank.model(batch(7, rank.transport.rank), skip=(0,)))
        return first, rank.step(rank.model(batch(5, rank.transport.rank))), rank.values()

    rank = rank_of(transport, stage)
    before = copy.deepcopy(rank.optimizer.state_dict())
    train(rank, 1)
    saved, at = copy.deepcopy(rank.optimizer.state_dict()), rank.values()
    after = two_updates(rank)
    cut = copy.deepcopy(rank.optimizer.state_dict())
    rank.optimizer.load_state_dict(saved)
    assert all(torch.equal(value, at[name]) for name, value in rank.values().items())
    again = two_updates(rank)
    assert after[:2] == again[:2]
    assert all(torch.equal(again[2][name], value) for name, value in after[2].items())
    fresh = rank_of(transport, stage)
    fresh.optimizer.load_state_dict(cut)
    last = [made.step(made.model(batch(6, transport.rank))) for made in (rank, fresh)]
    assert last[0] == last[1]
    assert all(torch.equal(value, fresh.values()[name]) for name, value in rank.values().items())
    rank.optimizer.load_state_dict(before)
    train(rank, 1)
    assert all(torch.equal(value, at[name]) for name, value in rank.values().items())
    with pytest.raises(ValueError, match="expected 1 param groups and masters of .* found 1 and .*load_checkpoint"):
        rank.optimizer.load_state_dict({**before, "masters": before["masters"][1:]})


@pytest.mark.parametrize("stage", [0, 1])
@on_threads(2)
def test_what_a_program_writes_into_parameters_reaches_the_masters(transport: LoopbackTransport, stage: int) -> None:
    rank = rank_of(transport, stage, stack(dtype=torch.bfloat16))
    weight = rank.model.get_parameter("head.weight")
    with torch.no_grad():
        weight.fill_(3.0)
    rank.optimizer.set_lr(0.0)
    rank.step(rank.model(batch(0).bfloat16()))
    assert bool((rank.values()["head.weight"] == 3.0).all())
    weight.data.fill_(4.0)  # which nothing can see
    rank.optimizer.refresh_fp32_params()
    rank.step(rank.model(batch(0).bfloat16()))
    assert bool((rank.values()["head.weight"] == 4.0).all())
    assert rank.optimizer.get_lr() == 0.0


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_threads(2)
def test_masters_that_were_written_are_published(transport: LoopbackTransport, stage: int) -> None:
    rank = rank_of(transport, stage, stack(dtype=torch.bfloat16))
    train_values = rank.values()
    for master in rank.runtime.masters:
        master.flat.mul_(2.0)
    rank.optimizer.publish_masters()
    for name, value in rank.values().items():
        assert torch.equal(value, 2 * train_values[name])


def test_optimizers_without_a_flat_update_get_gradients_that_are_ready() -> None:
    class Plain(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            self.seen = [p.grad is not None for group in self.param_groups for p in group["params"]]
            return super().step(closure)

    def body(transport: LoopbackTransport) -> dict[str, torch.Tensor]:
        rank = rank_of(
            transport,
            1,
            make=lambda model: Plain(model.parameters(), lr=0.02, eps=1e-4, weight_decay=0.1),
            loss_scaler=LossScaler(16.0),
        )
        assert rank.optimizer.flat_update is None
        for step in range(2):
            rank.step(rank.model(batch(step, transport.rank)) * 16.0)
            optimizer = rank.optimizer.optimizer
            assert all(optimizer.seen)  # type: ignore[attr-defined]
            assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
        return rank.values()

    for found in run_threads(body, 2):
        torch.testing.assert_close(found, reference(2, losses, 2), **CLOSE)


@on_threads(2)
def test_runs_are_cut_where_labels_differ_and_keep_their_state(transport: LoopbackTransport) -> None:
    rank = rank_of(transport, 1, joined=10**6)
    train(rank, 1)
    (master,) = rank.runtime.masters
    moments = torch.cat([rank.optimizer.state[run.param]["exp_avg"] for run in master.runs])
    count = len(master.runs)
    rank.optimizer.cut_runs([[number < 4 for number in range(len(master.layout.tiles))]])
    params = [p for group in rank.optimizer.param_groups for p in group["params"]]
    assert len(master.runs) == len(params) >= count
    assert torch.equal(torch.cat([rank.optimizer.state[run.param]["exp_avg"] for run in master.runs]), moments)
    train(rank, 1)


@on_threads(2)
def test_memory_of_states_is_counted_once(transport: LoopbackTransport) -> None:
    rank = rank_of(transport, 1)
    assert rank.optimizer.count_state() == 0
    train(rank, 1)
    owned = sum(run.param.numel() for master in rank.runtime.masters for run in master.runs)
    assert rank.optimizer.count_state() == 2 * 4 * owned == rank.optimizer.count_state()


@on_threads(1)
def test_groups_that_a_program_changes_are_refused_and_the_face_is_the_torch_optimizers(
    transport: LoopbackTransport,
) -> None:
    rank = rank_of(transport, 1, make=adamw)
    rank.backward(rank.model(batch(0)))
    rank.optimizer.zero_grad()
    assert not rank.reducer.has_sums
    rank.optimizer.set_lr(0.5)
    assert rank.optimizer.get_lr() == 0.5 == rank.optimizer.optimizer.param_groups[0]["lr"]
    rank.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(CallOrderError):
        rank.optimizer.step()
    with pytest.raises(CallOrderError, match="override_loss_scale"):
        rank.optimizer.override_loss_scale(2.0)
    rank.optimizer.destroy()


@pytest.mark.parametrize(("has_parts", "name"), [(False, "third"), (True, "last")])
def test_a_gradient_that_is_not_finite_is_named_by_the_rank_that_has_it(has_parts: bool, name: str) -> None:
    """Ranks with another part of the model have other names."""
    names = [["first", "second", "third"], ["begin", "middle", "last"]]

    def body(transport: LoopbackTransport) -> tuple[int, str]:
        tiles = [SimpleNamespace(name=each) for each in names[transport.rank if has_parts else 0]]
        cut = [tiles[:1], tiles[1:]]
        masters = [SimpleNamespace(layout=SimpleNamespace(tiles=part)) for part in cut]
        bad = [None, 1 if transport.rank == 1 else None]
        buckets = [SimpleNamespace(result=None, first_not_finite=lambda found=found: found) for found in bad]
        groups = SimpleNamespace(job=transport, peers=LocalTransport() if has_parts else transport)
        reducer = SimpleNamespace(buckets=buckets)
        return StepAgreement(masters, reducer, groups, None).first_offender()  # type: ignore[arg-type]

    assert run_threads(body, 2) == [(1, name)] * 2


# The gradient norm is taken while gradients are summed; the update reads no gradient for it a second time.


def watched(every: list[dict[str, Any]]) -> list[int]:
    """Trains; every sum of squares must have been there before it was asked for, and be that of the gradient."""
    counts = []
    original = gradients.GradientBucket.sum_of_squares

    def checked(self: gradients.GradientBucket) -> float:
        result = self.result
        if result is None:
            return original(self)
        assert self.sum.squares is not None, self.bucket.label
        found = original(self)
        assert norm_from_squares(found) == norm_from_squares(squared_norm(result).item()), self.bucket.label
        counts[-1] += 1
        return found

    gradients.GradientBucket.sum_of_squares = checked
    try:
        for settings in every:
            counts.append(0)
            engine = make_engine(settings)
            train_some(engine, range(2))
            engine.destroy()
    finally:
        gradients.GradientBucket.sum_of_squares = original
    return counts


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_pass_of_its_own(ranks: int) -> None:
    every = [
        config(stage, precision=precision, accumulation=accumulation)
        for stage, precision in ((0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp16"))
        for accumulation in (1, 3)
    ]
    every.append(config(2, precision="bf16", accumulation=2, offload_optimizer={"device": "cpu"}))
    for counts in run_ranks(watched, ranks, every):
        assert all(count >= 2 for count in counts), counts


def written(settings: dict[str, Any]) -> float:
    """The norm after somebody has replaced a gradient."""
    from tests.harness.toy_models import losses_of, make_batch

    engine = make_engine(settings)
    engine.backward(losses_of(engine(make_batch(0, 0, 0, branch=True))).loss)
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            value = deepspeed.utils.safe_get_full_grad(parameter)
            if value is not None:
                deepspeed.utils.safe_set_full_grad(parameter, value * 0)
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return norm


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_written_gradient_counts(ranks: int) -> None:
    for stage in (0, 3):
        assert run_ranks(written, ranks, config(stage, precision="bf16")) == [0.0] * ranks
