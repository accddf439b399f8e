"""A rank's own sum over micro-batches takes gradients from where they lie, unless packing them is of use."""

from __future__ import annotations

import torch
import torch.distributed as dist

from deepspeed.engine import DeepSpeedEngine
from deepspeed.zero.gradient.gradient_bucket import GradientBucket
from tests.engine.support import adamw, engine_of, inputs, rank
from tests.harness import run_ranks
from tests.harness.toy_models import tower


def _by_backward(engine: DeepSpeedEngine, x: torch.Tensor) -> None:
    with engine.no_sync():
        engine.backward(engine(x))


def _by_hand(engine: DeepSpeedEngine, x: torch.Tensor) -> None:
    plain = tower()
    plain(x).backward()
    for parameter, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
        parameter.grad = other.grad


def _trained() -> None:
    ranks = dist.get_world_size()
    packed = []
    original = GradientBucket.pack

    def counted(bucket: GradientBucket) -> None:
        packed.append(bucket)
        original(bucket)

    GradientBucket.pack = counted
    try:
        for give in (_by_backward, _by_hand):
            packed.clear()
            engine = engine_of(tower(), 1)
            give(engine, inputs(0, rank()))
            engine.optimizer.step()
            assert bool(packed) is (ranks == 1), "alone the sum is the result, whose squares come with the packing"
            plain = tower()
            optimizer = adamw(plain)
            torch.stack([plain(inputs(0, other)) for other in range(ranks)]).mean().backward()
            optimizer.step()
            for mine, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
            engine.destroy()
    finally:
        GradientBucket.pack = original


def test_packed_only_where_squares_are_taken() -> None:
    for ranks in (1, 2):
        run_ranks(_trained, ranks)
