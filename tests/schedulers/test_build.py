"""Schedules from a config section and from the command line."""

import argparse

import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.schedulers import (
    SCHEDULES,
    VALID_LR_SCHEDULES,
    OneCycle,
    WarmupLR,
    add_tuning_arguments,
    build_scheduler,
    get_config_from_args,
    get_lr_from_config,
    override_1cycle_params,
    override_params,
    parse_arguments,
)


def optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.4)


def parsed(*options):
    return add_tuning_arguments(argparse.ArgumentParser()).parse_args(options)


def test_valid_names():
    assert VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    assert [cls.__name__ for cls in SCHEDULES.values()] == VALID_LR_SCHEDULES


def test_ours_and_torchs_are_built():
    ours = build_scheduler("WarmupLR", {"warmup_max_lr": 0.3, "warmup_num_steps": 5}, optimizer())
    assert type(ours) is WarmupLR and ours.max_lrs == [0.3]
    theirs = build_scheduler("StepLR", {"step_size": 3}, optimizer())
    assert type(theirs) is torch.optim.lr_scheduler.StepLR and theirs.step_size == 3
    plateau = build_scheduler("ReduceLROnPlateau", {"patience": 3}, optimizer())
    assert type(plateau) is torch.optim.lr_scheduler.ReduceLROnPlateau


def test_torchs_get_the_inner_optimizer():
    wrapper = argparse.Namespace(optimizer=optimizer())
    assert build_scheduler("StepLR", {"step_size": 3}, wrapper).optimizer is wrapper.optimizer


def test_no_warmup_steps_is_the_smallest_rise():
    assert build_scheduler("WarmupLR", {"warmup_num_steps": 0}, optimizer()).warmup_num_steps == 2


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("warmuplr", {}, ["'warmuplr' is unknown, did you mean WarmupLR?", "OneCycle", "StepLR"]),
        ("LRScheduler", {}, ["unknown"]),
        ("Optimizer", {}, ["unknown"]),
        ("WarmupLR", {"warmup_steps": 5}, ["scheduler.params.warmup_steps", "did you mean warmup_num_steps?"]),
        ("WarmupDecayLR", {}, ["scheduler.params.total_num_steps: WarmupDecayLR needs it"]),
        ("OneCycle", {"cycle_min_lr": 1}, ["cycle_max_lr: OneCycle needs it"]),
        ("StepLR", {"stepsize": 5}, ["did you mean step_size?", "step_size: StepLR needs it"]),
        ("WarmupLR", {"warmup_num_steps": -5}, ["warmup_num_steps must be a positive integer"]),
        ("CosineAnnealingLR", {"T_max": 9, "last_epoch": 5}, ["CosineAnnealingLR cannot be built", "initial_lr"]),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1, "step_size_up": 0}, ["CyclicLR cannot be built", "by zero"]),
    ],
)
def test_mistakes_are_named(name, params, words):
    with pytest.raises(DeepSpeedConfigError) as error:
        build_scheduler(name, params, optimizer())
    assert all(word in str(error.value) for word in words), error.value


DEFAULTS = {
    "lr_schedule": None,
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False,
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_momentum": False,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "warmup_min_lr": 0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
}


def test_option_defaults():
    assert vars(parsed()) == DEFAULTS


def test_parse_arguments_leaves_the_rest(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--lr_schedule", "OneCycle", "--mine", "3", "--cycle_momentum"])
    args, rest = parse_arguments()
    assert args.lr_schedule == "OneCycle" and args.cycle_momentum is True and rest == ["--mine", "3"]


@pytest.mark.parametrize(("text", "value"), [("True", True), ("false", False), ("0", False)])
def test_flags_with_a_value(text, value):
    assert parsed("--lr_range_test_staircase", text).lr_range_test_staircase is value


@pytest.mark.parametrize(
    "name", [name for name in VALID_LR_SCHEDULES if name not in ("WarmupDecayLR", "WarmupCosineLR")]
)
def test_a_config_from_options_can_be_built(name):
    config, reason = get_config_from_args(parsed("--lr_schedule", name))
    assert reason is None and config["type"] == name
    assert type(build_scheduler(config["type"], config["params"], optimizer())) is SCHEDULES[name]


def test_unset_counts_take_their_defaults():
    config, _ = get_config_from_args(parsed("--lr_schedule", "OneCycle", "--cycle_first_step_size", "7"))
    schedule = build_scheduler("OneCycle", config["params"], optimizer())
    assert isinstance(schedule, OneCycle)
    assert (schedule.second_step_size, schedule.first_stair_count, schedule.second_stair_count) == (7, 0, 0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [([], "not specified on command line"), (["--lr_schedule", "Nope"], "Nope is not a supported")],
)
def test_no_config_has_a_reason(options, reason):
    config, found = get_config_from_args(parsed(*options))
    assert config is None and reason in found


@pytest.mark.parametrize(
    ("config", "rate", "reason"),
    [
        ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.1}}, 0.1, ""),
        ({"type": "OneCycle", "params": {"cycle_max_lr": 0.2}}, 0.2, ""),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 0.3}}, 0.3, ""),
        ({"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.4}}, 0.4, ""),
        ({"type": "WarmupCosineLR", "params": {}}, None, "the optimizer's own"),
        ({"type": "WarmupLR", "params": {}}, None, "warmup_max_lr is not defined"),
        ({"params": {}}, None, "type not defined"),
        ({"type": "WarmupLR"}, None, "params not defined"),
        ({"type": "Nope", "params": {}}, None, "Nope is not a valid"),
    ],
)
def test_rate_from_config(config, rate, reason):
    found, text = get_lr_from_config(config)
    assert found == rate and reason in text and bool(text) == (rate is None)


def test_overrides_write_into_params():
    params = {"cycle_min_lr": 9.0, "mine": 1}
    override_1cycle_params(parsed("--cycle_min_lr", "0.5"), params)
    assert params["cycle_min_lr"] == 0.5 and params["mine"] == 1 and "warmup_min_lr" not in params
    override_params(parsed(), params)
    assert params["warmup_type"] == "log" and params["lr_range_test_step_size"] == 1000
