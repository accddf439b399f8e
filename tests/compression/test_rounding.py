"""Rounding, masks and schedules against the published formulas, written out again; zero groups; gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.compression.basic_layer import QuantAct
from deepspeed.compression.rounding import largest, learned, round_groups, straight_through
from deepspeed.compression.widths import BitWidth, WidthSchedule


def formula(group, bits, symmetric):
    """One group by the published formulas, value by value."""
    w = group.tolist()
    if bits == 1:
        mean = sum(map(abs, w)) / len(w)
        return [-mean if x < 0 else mean for x in w]
    if bits == 2:
        mean = sum(map(abs, w)) / len(w)
        large = [abs(x) for x in w if abs(x) > 0.7 * mean]
        return [math.copysign(sum(large) / len(large), x) if abs(x) > 0.7 * mean else 0.0 for x in w]
    if symmetric:
        s = 2 * max(map(abs, w)) / 2**bits
        return [min(max(round(x / s), -(2 ** (bits - 1))), 2 ** (bits - 1) - 1) * s for x in w]
    s = (max(w) - min(w)) / 2**bits
    z = round(min(w) / s) * s
    return [min(max(round((x - z) / s), 0), 2**bits - 1) * s + z for x in w]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_groups_follow_the_formulas(bits, symmetric):
    if bits < 3 and not symmetric:
        pytest.skip("signs are symmetric")
    torch.manual_seed(bits)
    groups = torch.randn(5, 21, dtype=torch.float32) * torch.tensor([[1e-3], [1.0], [7.0], [50.0], [1.0]])
    found = round_groups(groups, bits, symmetric=symmetric)
    expected = torch.tensor([formula(group.double(), bits, symmetric) for group in groups])
    # A quotient that lies between two codes in exact arithmetic may fall to either side in fp32.
    differs = (found.values() - expected).abs() > 1e-5 * groups.abs().amax(1, keepdim=True)
    assert differs.sum() <= 1
    assert found.values().unique(dim=1).shape[1] <= groups.shape[1]
    assert all(len(row.unique()) <= max(2**bits, 3 if bits == 2 else 0) for row in found.codes)


@given(st.integers(1, 8), st.booleans(), st.sampled_from([0.0, 1e-30, 0.3, -2.5]))
def test_groups_of_equal_values_stay_finite(bits, symmetric, value):
    groups = torch.full((2, 6), value)
    found = round_groups(groups, bits, symmetric=symmetric or bits < 3).values()
    assert found.isfinite().all()
    if value == 0 or (not symmetric and bits >= 3):
        assert torch.equal(found, groups)


def test_stochastic_rounding_is_right_on_average():
    groups = torch.linspace(-1, 1, 11).repeat(1, 2000)
    dice = torch.Generator().manual_seed(0)
    found = round_groups(groups, 3, generator=dice).values().view(2000, 11)
    inner = slice(1, 9)  # the largest values are cut by one step
    assert (found.mean(0) - groups[0, :11])[inner].abs().max() < 0.01
    assert len(found[:, 3].unique()) == 2


def test_gradients_pass_straight_through():
    weight = torch.randn(4, 6, requires_grad=True)
    result = straight_through(weight, torch.zeros(4, 6))
    (result * torch.arange(24.0).view(4, 6)).sum().backward()
    assert torch.equal(result, torch.zeros(4, 6)) and torch.equal(weight.grad, torch.arange(24.0).view(4, 6))


@given(st.integers(1, 40), st.floats(0.01, 1.0))
def test_masks_keep_exactly_the_share(total, share):
    values = torch.randint(0, 3, (total,)).float()  # with many equal ones
    mask = largest(values, share)
    kept = int(mask.sum())
    assert kept == math.ceil(round(share * total, 9))
    assert kept == total or values[mask].min() >= values[~mask].max()


def test_learned_masks_hand_their_gradient_to_the_scores():
    scores = torch.randn(3, 4, requires_grad=True)
    mask = learned(scores, 0.5)
    (mask * torch.arange(12.0).view(3, 4)).sum().backward()
    assert mask.sum() == 6 and torch.equal(scores.grad, torch.arange(12.0).view(3, 4))


def test_widths_fall_with_doubling_periods():
    schedule = WidthSchedule(offset=10, start=8, target=5, period=3)
    found = [schedule.at(step) and schedule.at(step).bits for step in range(30)]
    # Falls after 3, 6 and 12 updates from the tenth on.
    assert found == [None] * 10 + [8] * 3 + [7] * 3 + [6] * 6 + [5] * 8
    assert schedule.end == 22
    mixed = WidthSchedule(offset=0, start=8, target=7, period=4, mixing=0.25)
    assert [mixed.at(step).whole_share for step in range(10)] == [1, 0.75, 0.5, 0.25, 1, 0.75, 0.5, 0.25, 0, 0]
    assert WidthSchedule(offset=2, start=8, target=8).at(2) == BitWidth(8, 0.0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_activations_by_token_and_by_a_running_range(symmetric):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7)
    dynamic = QuantAct(4, symmetric=symmetric)
    assert torch.equal(dynamic(x), x)
    dynamic.is_acting = True
    expected = torch.tensor([[formula(token.double(), 4, symmetric) for token in row] for row in x])
    torch.testing.assert_close(dynamic(x), expected)
    static = QuantAct(8, symmetric=symmetric, static=True)
    static.is_acting = True
    other = torch.randn(2, 3, 7) * 3
    static(x)
    static(other)
    low, high = x.min() * 0.95 + other.min() * 0.05, x.max() * 0.95 + other.max() * 0.05
    torch.testing.assert_close(static.x_min_max, torch.stack((low, high)))
    static.eval()
    near = static(x)
    assert torch.equal(near, static(x)) and (near - x).abs().max() < 0.1
    assert static(other).abs().max() <= 1.01 * static.x_min_max.abs().max()  # cut to the range
    assert torch.equal(static.x_min_max, torch.stack((low, high)))
