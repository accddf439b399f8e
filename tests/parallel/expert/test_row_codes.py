"""Tokens that travel in 8 bits: how far they are off, what they cost, and that training hardly notices."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.comm.transports.counters import counted
from deepspeed.parallel.expert.row_codes import BLOCK, coded_width, decode_rows, encode_rows
from tests.engine.support import rank
from tests.harness import run_ranks
from tests.parallel.expert.models import batch, build
from tests.parallel.expert.test_auto import adamw, config


@pytest.mark.parametrize("width", [1, 7, BLOCK, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_a_step_of_each_block(width, dtype):
    generator = torch.Generator().manual_seed(width)
    rows = (torch.randn(5, width, generator=generator) * torch.tensor([[1e-20], [1.0], [50.0], [1e20], [0.0]])).to(
        dtype
    )
    codes = encode_rows(rows)
    assert codes.shape == (5, coded_width(width)) and codes.dtype is torch.uint8
    found = decode_rows(codes, width, dtype)
    assert found.dtype is dtype
    for block, near in zip(rows.float().split(BLOCK, 1), found.float().split(BLOCK, 1), strict=True):
        rounding = 2.0**-8 if dtype is torch.bfloat16 else 1e-6
        limit = block.abs().amax(1, keepdim=True) * (0.5 / 127 + rounding)
        assert ((near - block).abs() <= limit).all()
    assert len(decode_rows(encode_rows(rows[:0]), width, dtype)) == 0


def test_what_is_not_finite_is_not_finite_afterwards():
    rows = torch.ones(2, 300)
    rows[0, 5], rows[1, 299] = float("inf"), float("nan")
    found = decode_rows(encode_rows(rows), 300, torch.float32)
    assert not found[0, :BLOCK].isfinite().any() and found[0, BLOCK:].isfinite().all()
    assert not found[1, 2 * BLOCK :].isfinite().any() and found[1, : 2 * BLOCK].isfinite().all()


def _trained(dispatch: str | None, stage: int) -> tuple[list[float], int, int]:
    """Losses; bytes that all ranks asked to exchange in the last step; exchanges."""
    model = build("mixtral", hidden_size=256)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1 if parameter.dim() > 1 else 1.0)  # deviations of 0.02, as models are initialised
    settings = config(stage)
    settings["expert_parallel"]["dispatch_dtype"] = dispatch
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)[0]
    losses = []
    for step in range(8):
        with counted() as traffic:
            loss = engine(**batch(step, rank())).loss
            engine.backward(loss)
        engine.step()
        dist.all_reduce(told := loss.detach().clone())
        losses.append(told.item() / dist.get_world_size())
    engine.destroy()
    exchanged = traffic.asked_along["all_to_all", "expert"]
    dist.all_reduce(nbytes := torch.tensor(exchanged.nbytes))
    return losses, int(nbytes), exchanged.calls


def _compared() -> None:
    for stage in (0, 3):
        exact, whole, calls = _trained(None, stage)
        coded, less, coded_calls = _trained("int8", stage)
        assert coded != exact and coded == pytest.approx(exact, rel=1e-3)
        assert coded_calls == calls
        # Two of the four ways of a row of 256 fp32 elements take 264 bytes in place of 1024.
        assert less / whole == pytest.approx((264 + 1024) / 2048, abs=0.002)


def test_training_in_8_bits():
    run_ranks(_compared, 2)
