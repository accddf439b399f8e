"""What the schedules share: groups, tensors, state, and what they refuse."""

import logging

import pytest
import torch

from deepspeed.logging import logger
from deepspeed.schedulers import SCHEDULES, LRRangeTest, OneCycle, WarmupDecayLR, WarmupLR

ARGUMENTS = {
    "LRRangeTest": {},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 3},
    "WarmupLR": {"warmup_num_steps": 4},
    "WarmupDecayLR": {"total_num_steps": 9, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 4},
}


def optimizer(*lrs, cls=torch.optim.AdamW):
    return cls([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (0.4,)])


def build(name, target, **more):
    return SCHEDULES[name](target, **{**ARGUMENTS[name], **more})


@pytest.fixture
def warnings():
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


class Wrapper:
    def __init__(self, inner):
        self.optimizer = inner


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_object_with_an_optimizer_is_taken(name):
    target = optimizer()
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
    first_target, second_target = optimizer(), optimizer()
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
    target = optimizer(0.4)
    schedule = build(name, target, last_batch_iteration=2)
    assert target.param_groups[0]["lr"] == 0.4
    with pytest.raises(AssertionError, match="need to call step"):
        schedule.get_last_lr()
    schedule.step()
    reference_target = optimizer(0.4)
    build(name, reference_target).step(3)
    assert schedule.last_batch_iteration == 3
    assert target.param_groups[0]["lr"] == reference_target.param_groups[0]["lr"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_tensor_rate_is_filled_in_place(name):
    target = optimizer(torch.tensor(0.4))
    tensor = target.param_groups[0]["lr"]
    schedule = build(name, target)
    schedule.step()
    schedule.step()
    assert target.param_groups[0]["lr"] is tensor
    assert tensor.item() == pytest.approx(schedule.get_lr()[0])


def test_resuming_uses_the_rate_before_any_schedule():
    target = optimizer(0.4)
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
    target = optimizer(1.0, 1.0)
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
    target, alone = with_default(0.2, 2.0, None, 0.0), optimizer(0.2)
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
    target, alone = with_default(0.2, *lrs), optimizer(0.2)
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
        make(optimizer(1.0, 1.0, 1.0))


def test_groups_added_later_are_noticed():
    target = optimizer()
    schedule = build("WarmupLR", target)
    target.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="2 param groups, but the schedule was made for 1"):
        schedule.step()


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("steps", [0, -1, 2.5, "10", True, None])
def test_warmup_steps_must_be_a_positive_integer(name, steps):
    with pytest.raises(ValueError, match="warmup_num_steps must be a positive integer"):
        build(name, optimizer(), warmup_num_steps=steps)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
def test_range_test_steps_must_be_a_positive_integer(steps):
    with pytest.raises(ValueError, match="lr_range_test_step_size must be a positive integer"):
        LRRangeTest(optimizer(), lr_range_test_step_size=steps)


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
        build("OneCycle", optimizer(), **bad)


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_unknown_kind_of_rise_is_log_with_a_warning(name, warnings):
    odd, log = optimizer(), optimizer()
    build(name, odd, warmup_type="cubic").step(2)
    build(name, log, warmup_type="log").step(2)
    assert odd.param_groups[0]["lr"] == log.param_groups[0]["lr"]
    assert len(warnings) == 1 and "cubic" in warnings[0]


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_run_shorter_than_the_rise_is_noted(name, warnings):
    build(name, optimizer(), total_num_steps=3)
    assert len(warnings) == 1 and "total_num_steps 3 is less than warmup_num_steps 4" in warnings[0]


def test_momentum_without_betas_is_noted(warnings):
    build("OneCycle", optimizer(cls=torch.optim.SGD))
    assert len(warnings) == 1 and "SGD has no betas" in warnings[0]
    build("OneCycle", optimizer(cls=torch.optim.SGD), cycle_momentum=False)
    assert len(warnings) == 1
