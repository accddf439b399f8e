"""The gradient norm: the same number for any cut at blocks, and near the fp64 truth."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.zero.tiling.layout import BLOCK
from deepspeed.zero.update.norm import norm_from_squares, squared_norm


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
