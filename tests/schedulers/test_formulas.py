"""Every schedule against its formula, from the first update on."""

import math

import pytest
import torch

from deepspeed.schedulers import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


def optimizer(*lrs):
    return torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs])


def trace(make, *lrs, steps=25):
    """Rates of group 0: as constructed, then after each step."""
    target = optimizer(*(lrs or (0.4,)))
    schedule = make(target)
    rates = [target.param_groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        rates.append(target.param_groups[0]["lr"])
        assert schedule.get_last_lr() == schedule.get_lr() == [group["lr"] for group in target.param_groups]
    return rates


def rise(i, kind, width):
    return i / width if kind == "linear" else math.log(i + 1) / math.log(width)


@pytest.mark.parametrize("kind", ["linear", "log"])
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_warmup(kind, num_steps):
    rates = trace(
        lambda o: WarmupLR(o, warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=num_steps, warmup_type=kind)
    )
    width = max(2, num_steps)
    expected = [0.1 + 0.4 * (rise(i, kind, width) if i < width else 1) for i in range(25)]
    assert rates == pytest.approx([0.1, *expected], rel=1e-12)


def test_warmup_to_the_groups_own_rate():
    target = optimizer(0.3, 0.6)
    schedule = WarmupLR(target, warmup_num_steps=2)
    assert schedule.get_last_lr() == [0.0, 0.0]
    schedule.step(2)
    assert schedule.get_last_lr() == [0.3, 0.6]


@pytest.mark.parametrize("kind", ["linear", "log"])
@pytest.mark.parametrize(("num_steps", "total"), [(5, 20), (1, 20), (5, 5), (5, 6)])
def test_warmup_decay(kind, num_steps, total):
    rates = trace(
        lambda o: WarmupDecayLR(
            o, total, warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=num_steps, warmup_type=kind
        )
    )
    width = max(2, num_steps)
    expected = [
        0.1 + 0.4 * (rise(i, kind, width) if i < width else max(0, (total - i) / max(1, total - width)))
        for i in range(25)
    ]
    assert rates == pytest.approx([0.1, *expected], rel=1e-12)
    assert rates[-1] == pytest.approx(0.1), "the decay ends at the least rate"


@pytest.mark.parametrize("kind", ["linear", "log"])
@pytest.mark.parametrize(("num_steps", "total"), [(5, 20), (1, 20), (5, 5)])
def test_warmup_cosine(kind, num_steps, total):
    rates = trace(lambda o: WarmupCosineLR(o, total, 0.2, num_steps, 0.05, kind))
    width = max(2, num_steps)

    def ratio(i):
        if i < width:
            return 0.2 + 0.8 * rise(i, kind, width)
        progress = min(1, (i - width + 1) / max(1, total - width))
        return 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2

    assert rates == pytest.approx([0.0, *(0.4 * ratio(i) for i in range(25))], rel=1e-12)
    assert rates[-1] == pytest.approx(0.4 * 0.05)


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test(staircase):
    rates = trace(lambda o: LRRangeTest(o, 0.01, 4, 2.0, staircase))
    units = [(i + 1) / 4 for i in range(25)]
    expected = [0.01 * (1 + 2.0 * (math.floor(k) if staircase else k)) for k in units]
    assert rates == pytest.approx([0.01, *expected], rel=1e-12)


def test_one_cycle_rate():
    rates = trace(
        lambda o: OneCycle(
            o, 0.1, 0.5, decay_lr_rate=0.5, cycle_first_step_size=4, cycle_second_step_size=8, decay_step_size=2
        )
    )
    up = [0.1 + 0.4 * k / 4 for k in range(5)]
    down = [0.5 - 0.4 * k / 8 for k in range(1, 9)]
    decay = [0.1 / (1 + 0.5 * n / 2) for n in range(1, 14)]
    assert rates == pytest.approx([*up, *down, *decay], rel=1e-12)


@pytest.mark.parametrize("off", [{"decay_lr_rate": 0.0, "decay_step_size": 2}, {"decay_lr_rate": 0.5}])
def test_one_cycle_without_decay_stays_at_the_least_rate(off):
    rates = trace(lambda o: OneCycle(o, 0.1, 0.5, cycle_first_step_size=3, **off))
    assert rates[3] == pytest.approx(0.5) and rates[6:] == pytest.approx([0.1] * 20)


def test_one_cycle_momentum_moves_inversely():
    target = optimizer(0.1)
    schedule = OneCycle(
        target, 0.1, 0.5, cycle_first_step_size=2, cycle_min_mom=0.8, cycle_max_mom=0.9, decay_mom_rate=0.1,
        decay_step_size=1,
    )  # fmt: skip
    betas = [target.param_groups[0]["betas"]]
    for _ in range(5):
        schedule.step()
        betas.append(target.param_groups[0]["betas"])
        assert schedule.get_mom() == [betas[-1]]
    assert [first for first, _ in betas] == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.1])
    assert {second for _, second in betas} == {0.99}


def test_one_cycle_stairs():
    rates = trace(lambda o: OneCycle(o, 0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2), steps=8)
    assert rates == pytest.approx([0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 0.0])
    smooth_down = trace(
        lambda o: OneCycle(o, 0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2, cycle_second_stair_count=0),
        steps=8,
    )
    assert smooth_down[4:] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_one_cycle_with_a_stair_per_step_is_smooth():
    kwargs = {"cycle_first_step_size": 100, "cycle_second_step_size": 50}
    stairs = {"cycle_first_stair_count": 100, "cycle_second_stair_count": 50}
    smooth = trace(lambda o: OneCycle(o, 0.0, 1.0, **kwargs), steps=150)
    assert trace(lambda o: OneCycle(o, 0.0, 1.0, **kwargs, **stairs), steps=150) == pytest.approx(smooth)


def test_one_cycle_without_betas_leaves_momentum_alone():
    target = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.7)
    schedule = OneCycle(target, 0.1, 0.5, cycle_first_step_size=2)
    schedule.step()
    assert schedule.get_mom() is None and target.param_groups[0]["momentum"] == 0.7
    assert "betas" not in target.param_groups[0]


def test_one_cycle_with_an_empty_second_half():
    rates = trace(lambda o: OneCycle(o, 0.1, 0.5, cycle_first_step_size=2, cycle_second_step_size=0), steps=4)
    assert rates == pytest.approx([0.1, 0.3, 0.5, 0.1, 0.1])
