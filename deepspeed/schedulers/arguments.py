"""Command-line options of the schedules, for scripts that tune them; the engine does not read them."""

from __future__ import annotations

import argparse
from typing import Any

LR_SCHEDULE = "lr_schedule"

_RANGE_TEST = "LRRangeTest"
_ONE_CYCLE = "OneCycle"


def _truth(text: str) -> bool:
    """Parses a flag with a value, since ``bool("False")`` is true."""
    lowered = text.lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, but got {text!r}")


#: Option, reader, default, meaning, by family of schedules.
_OPTIONS: dict[str, tuple[tuple[str, Any, Any, str], ...]] = {
    "range test": (
        ("lr_range_test_min_lr", float, 0.001, "rate at the start"),
        ("lr_range_test_step_rate", float, 1.0, "growth per unit"),
        ("lr_range_test_step_size", int, 1000, "steps per unit"),
        ("lr_range_test_staircase", _truth, False, "grow in steps instead of continuously"),
    ),
    "1-cycle": (
        ("cycle_first_step_size", int, 1000, "steps up"),
        ("cycle_first_stair_count", int, -1, "steps of a staircase on the way up; -1: continuous"),
        ("cycle_second_step_size", int, -1, "steps down; -1: as many as up"),
        ("cycle_second_stair_count", int, -1, "steps of a staircase on the way down; -1: as many as up"),
        ("decay_step_size", int, 1000, "steps per unit of decay"),
        ("cycle_min_lr", float, 0.01, "rate at the ends of the cycle"),
        ("cycle_max_lr", float, 0.1, "rate in the middle"),
        ("decay_lr_rate", float, 0.0, "decay of the rate after the cycle"),
        ("cycle_momentum", None, False, "change the momentum too"),
        ("cycle_min_mom", float, 0.8, "momentum in the middle"),
        ("cycle_max_mom", float, 0.9, "momentum at the ends"),
        ("decay_mom_rate", float, 0.0, "growth of the momentum after the cycle"),
    ),
    "warmup": (
        ("warmup_min_lr", float, 0.0, "rate at the start"),
        ("warmup_max_lr", float, 0.001, "rate after the rise"),
        ("warmup_num_steps", int, 1000, "steps of the rise"),
        ("warmup_type", str, "log", "log or linear"),
        ("warmup_min_ratio", float, 0.01, "ratio of the rate to lr at the start (cosine)"),
        ("cos_min_ratio", float, 0.01, "ratio of the rate to lr at the end (cosine)"),
    ),
}

#: Which options each schedule takes.
_TAKES: dict[str, tuple[str, ...]] = {
    _RANGE_TEST: tuple(name for name, *_ in _OPTIONS["range test"]),
    _ONE_CYCLE: tuple(name for name, *_ in _OPTIONS["1-cycle"]),
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupCosineLR": ("warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options of all schedules to ``parser`` and returns it."""
    group = parser.add_argument_group("Convergence tuning", "learning-rate schedules")
    group.add_argument(f"--{LR_SCHEDULE}", type=str, default=None, help="name of the schedule")
    for family, options in _OPTIONS.items():
        for name, reader, default, meaning in options:
            help_text = f"{family}: {meaning} (default {default})"
            if reader is None:
                group.add_argument(f"--{name}", action="store_true", default=default, help=help_text)
            else:
                group.add_argument(f"--{name}", type=reader, default=default, help=help_text)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Reads the options from the command line; returns them, and what was not recognized."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _override(args: argparse.Namespace, params: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(args, name, None)
        if value is None:
            continue
        is_unset_count = value == -1 and name.startswith("cycle_")
        params[name] = (0 if name == "cycle_first_stair_count" else None) if is_unset_count else value


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Writes the range test's options that ``args`` has into ``params``."""
    _override(args, params, _TAKES[_RANGE_TEST])


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Writes OneCycle's options that ``args`` has into ``params``."""
    _override(args, params, _TAKES[_ONE_CYCLE])


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:  # noqa: N802 - public name
    """Writes WarmupLR's options that ``args`` has into ``params``."""
    _override(args, params, _TAKES["WarmupLR"])


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Writes the options of all schedules that ``args`` has into ``params``."""
    for names in _TAKES.values():
        _override(args, params, names)


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Returns the ``scheduler`` section for parsed options and None, or None and the reason why there is none."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if name not in _TAKES:
        return None, f"{name} is not a supported LR schedule; choose one of {', '.join(_TAKES)}"
    params: dict[str, Any] = {}
    _override(args, params, _TAKES[name])
    return {"type": name, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[Any, str]:
    """Returns the optimizer's rate for a ``scheduler`` section and "", or None and why the section does not set it."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name, params = config["type"], config["params"]
    decisive = {_RANGE_TEST: "lr_range_test_min_lr", _ONE_CYCLE: "cycle_max_lr"}
    decisive.update({"WarmupLR": "warmup_max_lr", "WarmupDecayLR": "warmup_max_lr"})
    if name not in _TAKES:
        return None, f"{name} is not a valid LR schedule; choose one of {', '.join(_TAKES)}"
    if name not in decisive:
        return None, f"{name} scales the optimizer's own learning rate"
    if params.get(decisive[name]) is None:
        return None, f"{name}: {decisive[name]} is not defined in config"
    return params[decisive[name]], ""
