"""Compares the reference trainer with plain torch on the whole batch, and against torch's own scaler."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.harness.toy_models import awkward, losses_of, make_batch, param_groups
from tests.oracle.optimizers import REFERENCES
from tests.oracle.trainer import ReferenceTrainer, Scale


def _adamw(model):
    return REFERENCES["AdamW"](param_groups(model))


@pytest.mark.parametrize("reduce_each_backward", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_and_micro_batches_are_one_big_batch(ranks, reduce_each_backward):
    trainer = ReferenceTrainer(awkward(), _adamw, ranks=ranks, reduce_each_backward=reduce_each_backward, clip=0.3)
    plain = awkward()
    optimizer = _adamw(plain)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            batches = [make_batch(step, micro, r, branch=step != 1) for r in range(ranks)]
            trainer.backward([losses_of(trainer.forward(b)).loss / 2 for b in batches], boundary=micro == 1)
            for batch in batches:
                (losses_of(plain(batch)).loss / 2 / ranks).backward()
        trainer.step()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        optimizer.step()
        torch.testing.assert_close(trainer.norm, norm.item(), rtol=1e-5, atol=0)
        for name, weight in trainer.weights().items():
            torch.testing.assert_close(weight, plain.get_parameter(name).data, rtol=1e-5, atol=1e-6, msg=name)


def test_half_precision_with_a_scale_is_near_full_precision():
    scaled, full = (
        ReferenceTrainer(awkward(), _adamw, ranks=2, compute_dtype=dtype, scale=scale, reduce_each_backward=True)
        for dtype, scale in ((torch.float16, Scale(256, dynamic=False)), (torch.float32, None))
    )
    for trainer in (scaled, full):
        outs = [losses_of(trainer.forward(make_batch(0, r))) for r in range(2)]
        trainer.backward([out.loss for out in outs], boundary=True)
        trainer.step()
    assert scaled.norm == pytest.approx(full.norm, rel=1e-2)


def test_the_scale_follows_torchs():
    ours, theirs = (
        Scale(16.0, dynamic=True, window=3, hysteresis=1),
        torch.amp.GradScaler("cpu", 16.0, growth_interval=3),
    )
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for overflow in [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0]:
        theirs.scale(torch.zeros(()))
        parameter.grad = torch.tensor([float("inf") if overflow else 1.0])
        theirs.step(optimizer)
        theirs.update()
        ours.after_step(bool(overflow))
        assert ours.value == theirs.get_scale()


def test_an_overflow_changes_nothing():
    trainer = ReferenceTrainer(awkward(), _adamw, ranks=1, reduce_each_backward=True)
    before, state = trainer.weights(), copy.deepcopy(trainer.optimizer.state_dict())
    trainer.backward([losses_of(trainer.forward(make_batch(0, boost=float("inf")))).loss], boundary=True)
    trainer.step()
    assert trainer.overflow and trainer.optimizer.state_dict() == state
    assert all(torch.equal(value, before[name]) for name, value in trainer.weights().items())
