"""Learning rates by their formulas, and what all schedulers have in common."""

import logging
import math

import pytest
import torch

from deepspeed.schedulers import SCHEDULES, LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from tests.harness.logged import logged

# Every schedule against its formula, from the first update on.


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


# What the schedules share: groups, tensors, state, and what they refuse.


ARGUMENTS = {
    "LRRangeTest": {},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 3},
    "WarmupLR": {"warmup_num_steps": 4},
    "WarmupDecayLR": {"total_num_steps": 9, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 4},
}


def optimizer_behavior(*lrs, cls=torch.optim.AdamW):
    return cls([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (0.4,)])


def build(name, target, **more):
    return SCHEDULES[name](target, **{**ARGUMENTS[name], **more})


@pytest.fixture
def warnings():
    with logged(logging.WARNING) as lines:
        yield lines


class Wrapper:
    def __init__(self, inner):
        self.optimizer = inner


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_object_with_an_optimizer_is_taken(name):
    target = optimizer_behavior()
    schedule = build(name, Wrapper(target))
    schedule.step()
    assert target.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    assert not isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("wrong", [None, object(), Wrapper(object())])
def test_anything_else_is_refused(name, wrong):
    with pytest.raises(TypeError, match=r"is not a torch.optim.Optimizer"):
        build(name, wrong)


@pytest.mark.parametrize("name", SCHEDULES)
def test_state_is_the_step_alone(name):
    first_target, second_target = optimizer_behavior(), optimizer_behavior()
    first, second = build(name, first_target), build(name, second_target)
    for _ in range(5):
        first.step()
    assert first.state_dict() == {"last_batch_iteration": 4}
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr()
    for _ in range(3):
        first.step()
        second.step()
        assert first_target.param_groups[0]["lr"] == second_target.param_groups[0]["lr"]
        assert first_target.param_groups[0]["betas"] == second_target.param_groups[0]["betas"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_going_on_from_a_later_step_writes_nothing_at_first(name):
    target = optimizer_behavior(0.4)
    schedule = build(name, target, last_batch_iteration=2)
    assert target.param_groups[0]["lr"] == 0.4
    with pytest.raises(AssertionError, match="need to call step"):
        schedule.get_last_lr()
    schedule.step()
    reference_target = optimizer_behavior(0.4)
    build(name, reference_target).step(3)
    assert schedule.last_batch_iteration == 3
    assert target.param_groups[0]["lr"] == reference_target.param_groups[0]["lr"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_tensor_rate_is_filled_in_place(name):
    target = optimizer_behavior(torch.tensor(0.4))
    tensor = target.param_groups[0]["lr"]
    schedule = build(name, target)
    schedule.step()
    schedule.step()
    assert target.param_groups[0]["lr"] is tensor
    assert tensor.item() == pytest.approx(schedule.get_lr()[0])


def test_resuming_uses_the_rate_before_any_schedule():
    target = optimizer_behavior(0.4)
    build("WarmupCosineLR", target).step(6)
    assert target.param_groups[0]["lr"] < 0.4
    resumed = build("WarmupCosineLR", target, last_batch_iteration=6)
    assert resumed.org_lrs == [0.4]


@pytest.mark.parametrize(
    ("make", "rates"),
    [
        (lambda o: WarmupLR(o, [0.1, 0.2], (0.3, 0.4)), [0.1, 0.2]),
        (lambda o: WarmupDecayLR(o, 5000, [0.1, 0.2], [0.3, 0.4]), [0.1, 0.2]),
        (lambda o: LRRangeTest(o, [0.1, 0.2]), [0.1, 0.2]),
        (lambda o: OneCycle(o, [0.1, 0.2], [0.3, 0.4], cycle_min_mom=[0.7, 0.8]), [0.1, 0.2]),
    ],
)
def test_lists_per_group(make, rates):
    target = optimizer_behavior(1.0, 1.0)
    make(target)
    assert [group["lr"] for group in target.param_groups] == rates


PEAKS = {
    "WarmupLR": lambda o: WarmupLR(o, 0.1, 0.4, 4),
    "WarmupDecayLR": lambda o: WarmupDecayLR(o, 40, 0.1, 0.4, 4),
    "OneCycle": lambda o: OneCycle(o, 0.1, 0.4, cycle_first_step_size=4),
}


def with_default(default, *lrs):
    """An optimizer with this rate, and groups; a rate of None is the optimizer's."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in lrs]
    return torch.optim.AdamW(
        [group if lr is None else {**group, "lr": lr} for group, lr in zip(groups, lrs, strict=True)], default
    )


def rates(schedule, target, steps=9):
    found = [[group["lr"] for group in target.param_groups]]
    for _ in range(steps):
        schedule.step()
        found.append([group["lr"] for group in target.param_groups])
    return found


@pytest.mark.parametrize("name", PEAKS)
def test_groups_rise_to_their_own_rates(name, warnings):
    """The others rise to the one maximum; all keep their ratio on the way."""
    target, alone = with_default(0.2, 2.0, None, 0.0), optimizer_behavior(0.2)
    found, wanted = rates(PEAKS[name](target), target), rates(PEAKS[name](alone), alone)
    for (own, others, none), (single,) in zip(found, wanted, strict=True):
        assert others == single and none == 0.0
        assert own == pytest.approx(single * 2.0 / 0.4)
    assert max(own for own, *_ in found) == pytest.approx(2.0)
    (line,) = warnings
    assert f"{name}: param groups 0 (lr 2), 2 (lr 0) have learning rates of their own, and rise to them" in line


@pytest.mark.parametrize("name", PEAKS)
@pytest.mark.parametrize("lrs", [(3.0, 3.0), (None, None, 0.2), (5.0,)])
def test_equal_rates_give_way_to_the_one_maximum(name, lrs, warnings):
    target, alone = with_default(0.2, *lrs), optimizer_behavior(0.2)
    found, wanted = rates(PEAKS[name](target), target), rates(PEAKS[name](alone), alone)
    assert found == [single * len(lrs) for single in wanted] and not warnings


def test_a_range_test_names_the_groups_that_lose_their_rates(warnings):
    target = with_default(0.2, 2.0, None)
    LRRangeTest(target, 0.1)
    assert [group["lr"] for group in target.param_groups] == [0.1, 0.1]
    (line,) = warnings
    assert "param groups 0 (lr 2) have learning rates of their own, and lose them" in line
    LRRangeTest(with_default(0.2, 2.0, None), [0.1, 0.2])
    assert len(warnings) == 1


def test_only_some_of_many_groups_are_named(warnings):
    PEAKS["WarmupLR"](with_default(0.2, *(0.01 * depth for depth in range(1, 30))))
    assert warnings[0].count("(lr ") == 5 and "and 23 more have" in warnings[0]


def test_own_rates_come_back_on_resuming():
    target = with_default(0.2, 2.0, None)
    first = PEAKS["OneCycle"](target)
    rates(first, target, 3)
    resumed = OneCycle(target, 0.1, 0.4, cycle_first_step_size=4, last_batch_iteration=2)
    assert resumed.max_lrs == [2.0, 0.4]
    later = with_default(0.2, 2.0, None)
    loaded = PEAKS["OneCycle"](later)
    loaded.load_state_dict(first.state_dict())
    assert loaded.get_last_lr() == first.get_last_lr()


@pytest.mark.parametrize(
    "make",
    [
        lambda o: WarmupLR(o, [0.1, 0.2]),
        lambda o: WarmupLR(o, warmup_max_lr=[0.1]),
        lambda o: LRRangeTest(o, [0.1]),
        lambda o: OneCycle(o, 0.1, [0.1]),
        lambda o: OneCycle(o, 0.1, 0.2, cycle_max_mom=[0.1]),
    ],
)
def test_lists_of_another_length_are_refused(make):
    with pytest.raises(ValueError, match="3 param groups"):
        make(optimizer_behavior(1.0, 1.0, 1.0))


def test_groups_added_later_are_noticed():
    target = optimizer_behavior()
    schedule = build("WarmupLR", target)
    target.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="2 param groups, but the schedule was made for 1"):
        schedule.step()


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("steps", [0, -1, 2.5, "10", True, None])
def test_warmup_steps_must_be_a_positive_integer(name, steps):
    with pytest.raises(ValueError, match="warmup_num_steps must be a positive integer"):
        build(name, optimizer_behavior(), warmup_num_steps=steps)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
def test_range_test_steps_must_be_a_positive_integer(steps):
    with pytest.raises(ValueError, match="lr_range_test_step_size must be a positive integer"):
        LRRangeTest(optimizer_behavior(), lr_range_test_step_size=steps)


@pytest.mark.parametrize(
    "bad",
    [
        {"cycle_first_step_size": 0},
        {"cycle_first_step_size": -1},
        {"cycle_second_step_size": -1},
        {"decay_step_size": -1},
        {"cycle_first_stair_count": -1},
    ],
)
def test_one_cycle_sizes_are_checked(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        build("OneCycle", optimizer_behavior(), **bad)


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_unknown_kind_of_rise_is_log_with_a_warning(name, warnings):
    odd, log = optimizer_behavior(), optimizer_behavior()
    build(name, odd, warmup_type="cubic").step(2)
    build(name, log, warmup_type="log").step(2)
    assert odd.param_groups[0]["lr"] == log.param_groups[0]["lr"]
    assert len(warnings) == 1 and "cubic" in warnings[0]


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_run_shorter_than_the_rise_is_noted(name, warnings):
    build(name, optimizer_behavior(), total_num_steps=3)
    assert len(warnings) == 1 and "total_num_steps 3 is less than warmup_num_steps 4" in warnings[0]


def test_momentum_without_betas_is_noted(warnings):
    build("OneCycle", optimizer_behavior(cls=torch.optim.SGD))
    assert len(warnings) == 1 and "SGD has no betas" in warnings[0]
    build("OneCycle", optimizer_behavior(cls=torch.optim.SGD), cycle_momentum=False)
    assert len(warnings) == 1
