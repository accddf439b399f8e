"""Stochastic rounding: unbiased, between neighbors, and the same however a run is cut."""

import pytest
import torch

from deepspeed.ops import flat
from deepspeed.ops.flat import AdamRule, RuleUpdate
from deepspeed.ops.rounding import ElementRounding, NarrowStates, ParameterInterval

NUMEL = 200_000
GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def rounded(value, dtype, update=1, name="weight", role="master"):
    wide, narrow = torch.full((NUMEL,), value), torch.empty(NUMEL, dtype=dtype)
    ElementRounding(update, [ParameterInterval(name, 0, 0, NUMEL)]).store(wide, narrow, role=role, start=0)
    return narrow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0019, -0.3333, 3.1e-5, 1e-7, -2.7e-8, 211.37])
def test_results_are_neighbors_and_right_on_average(dtype, value):
    found = rounded(value, dtype).double()
    assert len(found.unique()) <= 2
    gap = (found.max() - found.min()).item()
    nearest = torch.tensor(value, dtype=torch.float32).to(dtype).double().item()
    assert gap > 0 and nearest in found.unique().tolist()
    # Of so many throws of 1 or 0 the mean is off by at most half a gap over their root, times five.
    assert abs(found.mean().item() - torch.tensor(value).double().item()) < 5 * gap / 2 / NUMEL**0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_exact_stays(dtype):
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-14, 2.0**-24, float("inf"), float("-inf")])
    found = torch.empty(8, dtype=dtype)
    ElementRounding(5, [ParameterInterval("w", 0, 0, 8)]).store(exact, found, role="master", start=0)
    assert torch.equal(found.float(), exact)


def test_nan_stays_nan_whatever_its_bits():
    odd = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    found = torch.empty(3, dtype=torch.bfloat16)
    for update in range(40):
        ElementRounding(update, [ParameterInterval("w", 0, 0, 3)]).store(odd, found, role="master", start=0)
        assert found.isnan().all()


def test_updates_parameters_and_roles_have_bits_of_their_own():
    base = rounded(1.0039, torch.bfloat16) == 1.0
    for other in ({"update": 2}, {"name": "bias"}, {"role": "state0"}):
        same = (base == (rounded(1.0039, torch.bfloat16, **other) == 1.0)).double().mean().item()
        assert abs(same - 0.5) < 0.02, other


def test_neighboring_elements_and_blocks_are_independent():
    bits = (rounded(1.00390625, torch.bfloat16) == 1.0).double() * 2 - 1  # half way
    for distance in (1, 2, 64, 1024, 65536):
        assert abs((bits[distance:] * bits[:-distance]).mean().item()) < 0.03, distance


@pytest.mark.parametrize("cuts", [[64], [640, 70_016], [131_072], [64, 128, 192, 199_936]])
def test_the_bits_do_not_depend_on_the_cuts(cuts, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    first, second = 150_000, NUMEL - 150_000
    start = torch.randn(NUMEL, generator=generator).bfloat16()
    grads = [torch.randn(NUMEL, generator=generator).bfloat16() for _ in range(2)]
    update = NarrowStates(RuleUpdate(AdamRule(decoupled=True)))

    def intervals(lower, upper):
        found = []
        for name, begin, count in (("a", 0, first), ("b", first, second)):
            low, high = max(begin, lower), min(begin + count, upper)
            if low < high:
                found.append(ParameterInterval(name, low - begin, low - lower, high - low))
        return found

    def run(bounds):
        master, states = start.clone(), {}
        for lower, upper in zip(bounds, bounds[1:], strict=False):
            states[lower] = {}
            for number, grad in enumerate(grads):
                rounding = ElementRounding(number, intervals(lower, upper))
                part = slice(lower, upper)
                update.flat_update(GROUP, master[part], grad[part], states[lower], rounding=rounding)
        return master, *(torch.cat([states[lower][key] for lower in bounds[:-1]]) for key in ("exp_avg", "exp_avg_sq"))

    whole = run([0, NUMEL])
    assert all(tensor.dtype == torch.bfloat16 for tensor in whole)
    monkeypatch.setattr(flat, "default_chunk_numel", lambda device: 4096)
    for found, expected in zip(run([0, *cuts, NUMEL]), whole, strict=True):
        assert torch.equal(found, expected)


def test_small_updates_are_not_lost():
    """Each is a hundredth of the distance to the next value: rounding to nearest would never move."""
    master, grad = torch.ones(4096, dtype=torch.bfloat16), torch.ones(4096)
    update, state, group = RuleUpdate(AdamRule(decoupled=True)), {}, {**GROUP, "lr": 4e-5, "weight_decay": 0.0}
    for number in range(500):
        rounding = ElementRounding(number, [ParameterInterval("w", 0, 0, 4096)])
        update.flat_update(group, master, grad, state, rounding=rounding)
    assert master.float().mean().item() == pytest.approx(1 - 500 * 4e-5, abs=2e-4)
    nearest = torch.ones(4096, dtype=torch.bfloat16)
    for _ in range(10):
        update.flat_update(group, nearest, grad, {})
    assert torch.equal(nearest, torch.ones_like(nearest))


def test_elements_of_no_known_parameter_are_refused():
    with pytest.raises(ValueError, match="36 of 100 elements"):
        ElementRounding(0, [ParameterInterval("w", 0, 0, 64)]).store(
            torch.ones(100), torch.empty(100, dtype=torch.bfloat16), role="master", start=0
        )
