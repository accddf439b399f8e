"""A rank's own sum takes gradients from where they lie, unless packing them is of use; norms do not depend on cuts."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.engine import DeepSpeedEngine
from deepspeed.zero.gradient.gradient_bucket import GradientBucket
from deepspeed.zero.gradient.gradient_sum import norm_from_squares, squared_norm
from deepspeed.zero.tiling.layout import BLOCK
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


@settings(max_examples=50)
@given(st.integers(1, 60), st.lists(st.integers(0, 60), max_size=6), st.integers(0, 10**6), st.integers(-20, 15))
def test_cuts_do_not_change_the_norm(num_blocks, cuts, seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(num_blocks * BLOCK, generator=generator) * 10.0**exponent
    bounds = sorted({0, num_blocks, *(cut for cut in cuts if cut < num_blocks)})
    parts = [flat[a * BLOCK : b * BLOCK] for a, b in zip(bounds, bounds[1:], strict=False)]
    whole = norm_from_squares(squared_norm(flat).item())
    assert norm_from_squares(sum(squared_norm(part).item() for part in parts)) == whole
    truth = flat.double().norm().item()
    # Squares of 1e-20 are subnormal in fp32 and have fewer digits.
    assert abs(whole - truth) <= (2e-7 if exponent > -20 else 1e-6) * truth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_long_buffer_is_as_exact_as_a_short_one(dtype):
    torch.manual_seed(0)
    flat = torch.randn(2**20).to(dtype)
    truth = flat.double().norm().item()
    assert abs(norm_from_squares(squared_norm(flat).item()) - truth) <= 2e-7 * truth


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_element_anywhere_makes_it_not_finite(dtype, bad):
    for position in (0, 63, 64, 6000, 6399):
        flat = torch.ones(6400, dtype=dtype)
        flat[position] = bad
        total = squared_norm(flat).item()
        assert not math.isfinite(total) and not math.isfinite(norm_from_squares(total))


def test_the_largest_fp16_gradient_is_finite():
    flat = torch.full((64 * 100,), 65504.0, dtype=torch.float16)
    assert norm_from_squares(squared_norm(flat).item()) == pytest.approx(65504.0 * 80)


def test_an_empty_buffer_has_norm_zero():
    for dtype in (torch.float32, torch.bfloat16):
        assert squared_norm(torch.empty(0, dtype=dtype)).item() == 0.0


def test_fp64_gradients_keep_their_range_and_have_norms_on_every_device() -> None:
    flat = torch.full((2 * BLOCK,), 1e30, dtype=torch.float64)
    assert squared_norm(flat).item() == pytest.approx(2 * BLOCK * 1e60)
    assert squared_norm(torch.empty(2 * BLOCK, dtype=torch.float64, device="meta")).dtype == torch.float64
