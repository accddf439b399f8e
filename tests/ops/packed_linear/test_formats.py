"""Packed weights against definitions of their own: what codes and scales mean, products, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.ops.packed_linear import formats, packed_format, packed_linear


def unpacked(bits, codes, scales, out_features, group):
    """The weight by the definition of the format, element by element."""
    if bits == 8:
        return codes.double() * scales.double()[:, None]
    rows = []
    for n in range(out_features):
        byte = codes[n // 64, :, n % 32]
        code = (byte >> 4 if n % 64 >= 32 else byte & 15).double()
        scale, offset = scales[:, n].double().repeat_interleave(group, dim=0).unbind(1)
        rows.append((code - 8) * scale + offset)
    return torch.stack(rows)


def relative(found, expected, terms=None):
    """Their distance, relative to ``expected``, or to the sum of its terms' magnitudes where these may cancel."""
    return ((found.double() - expected).norm() / (expected if terms is None else terms).norm()).item()


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from([8, 4]),
    out_features=st.integers(1, 200),
    groups=st.integers(1, 5),
    rows=st.integers(1, 60),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_products_and_gradients(bits, out_features, groups, rows, dtype, seed):
    torch.manual_seed(seed)
    weight, x = torch.randn(out_features, 32 * groups), torch.randn(rows, 32 * groups).to(dtype)
    how = packed_format(bits, 32)
    codes, scales = how.pack(weight)
    assert (tuple(codes.shape), tuple(scales.shape)) == how.shapes(*weight.shape)
    expected = unpacked(bits, codes, scales, out_features, 32)
    assert relative(how.unpack(codes, scales, out_features, torch.float32), expected) < 1e-6
    assert relative(expected, weight.double()) < (0.012 if bits == 8 else 0.13)
    x.requires_grad_()
    bias = torch.randn(out_features, requires_grad=True)
    found = packed_linear(x.view(1, rows, -1), codes, scales, out_features, how, bias)[0]
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    assert found.dtype == dtype
    doubled, offset = x.detach().double(), bias.detach().double()
    product = doubled @ expected.t() + offset
    assert relative(found, product, doubled.abs() @ expected.t().abs() + offset.abs()) < tolerance
    seen = torch.randn_like(found)
    found.backward(seen)
    assert relative(x.grad, seen.double() @ expected, seen.double().abs() @ expected.abs()) < tolerance
    assert relative(bias.grad, seen.double().sum(0), seen.double().abs().sum(0)) < tolerance


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_to_the_nearest(bits):
    torch.manual_seed(0)
    weight, how = torch.randn(70, 64), packed_format(bits, 64)
    codes, scales = how.pack(weight)
    step = scales.float()[:, None] if bits == 8 else scales[:, :70, 0].float().t()
    error = (how.unpack(codes, scales, 70, torch.float32) - weight).abs()
    # Half a step inside the range; at its ends the rounded scale may cut a little more.
    assert (error <= step * 0.5 + weight.abs() * 0.01).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_zeros_and_of_one_value(bits):
    how = packed_format(bits, 32)
    weight = torch.zeros(3, 64)
    weight[1] = 0.5
    back = how.unpack(*how.pack(weight), 3, torch.float32)
    torch.testing.assert_close(back, weight, rtol=0.01, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_kernel_and_the_unpacked_weight_agree(bits):
    torch.manual_seed(0)
    how = packed_format(bits, 64)
    codes, scales = how.pack(torch.randn(130, 128))
    x = torch.randn(4, 128).bfloat16()
    product = how.kernel(x, codes, scales)
    if product is None:
        pytest.skip("torch has no kernel for this processor")
    assert relative(product[:, :130], x.double() @ unpacked(bits, codes, scales, 130, 64).t()) < 1e-2


def test_another_order_of_codes_in_the_kernel_is_noticed(monkeypatch):
    how = packed_format(4, 32)
    codes, scales = how.pack(torch.randn(64, 64))
    x = torch.randn(2, 64).bfloat16()
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack_for_cpu", lambda q, k: q.to(torch.uint8)[:, ::2])
    formats._kernel_reads_it.cache_clear()
    try:
        assert how.kernel(x, codes, scales) is None
    finally:
        formats._kernel_reads_it.cache_clear()


@pytest.mark.parametrize("in_features", [1, 3, 24, 33, 40])
def test_any_number_of_input_features(in_features):
    torch.manual_seed(0)
    how = packed_format(8)
    codes, scales = how.pack(torch.randn(5, in_features))
    x = torch.randn(2, in_features).bfloat16()
    expected = x.double() @ unpacked(8, codes, scales, 5, 0).t()
    assert relative(packed_linear(x, codes, scales, 5, how), expected) < 1e-2


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_gradients_through_weights_of_few_bits(bits):
    torch.manual_seed(0)
    how = formats.GroupCodes(bits, 30, groups=3)
    codes, scales = how.pack(torch.randn(5, 30))
    x = torch.randn(2, 30, requires_grad=True)
    packed_linear(x, codes, scales, 5, how).sum().backward()
    torch.testing.assert_close(x.grad, how.unpack(codes, scales, 5, torch.float32).sum(0).expand(2, 30))


@pytest.mark.parametrize(("bits", "group", "text"), [(6, 64, "expected 8 or 4"), (4, 48, "32, 64, 128, 256")])
def test_formats_that_do_not_exist(bits, group, text):
    with pytest.raises(ValueError, match=text):
        packed_format(bits, group)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_four_bits_are_the_documented_formula_with_scales_in_bfloat16(dtype, mean):
    """docs/guide/inference.md: by a step from the formula in full precision, and nearly as near to the weight."""
    torch.manual_seed(0)
    weight = (mean + 0.05 * torch.randn(128, 256)).to(dtype)
    how = packed_format(4, 32)
    found = how.unpack(*how.pack(weight), 128, torch.float32)
    groups = weight.float().view(128, -1, 32)
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = (most - least) / 15
    formula = ((groups - least) / step).round().clamp(0, 15) * step + least
    rounding = 2.0**-8 * ((least + 8 * step).abs() + 8 * step)  # of offset and scale to bfloat16
    found = found.view_as(groups)
    assert ((found - groups).abs() <= 0.5 * step + rounding).all()
    assert ((found - formula).abs() <= step + 2 * rounding).all()
    ours, theirs = ((value - groups) / step for value in (found, formula))
    assert ours.square().mean().sqrt() <= theirs.square().mean().sqrt() + (0.002 if mean == 0 else 0.1)


def test_products_in_fp16_do_not_overflow():
    how = packed_format(8)
    codes, scales = how.pack(torch.full((3, 4096), 0.01))
    x = torch.full((50, 4096), 20.0, dtype=torch.float16)
    assert relative(packed_linear(x, codes, scales, 3, how), torch.full((50, 3), 819.2).double()) < 1e-2


@pytest.mark.parametrize("how", [packed_format(8), packed_format(4, 32), formats.GroupCodes(2, 32)])
def test_weights_without_output_features(how):
    codes, scales = how.pack(torch.randn(0, 32))
    assert how.unpack(codes, scales, 0, torch.bfloat16).shape == (0, 32)
    x = torch.randn(2, 32, requires_grad=True)
    packed_linear(x, codes, scales, 0, how).sum().backward()
    assert not x.grad.any()
