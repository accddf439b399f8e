"""Reads what a script's command line and the arguments of ``initialize`` set for training."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed.errors import DeepSpeedConfigError


def config_source(args: Any, config: Any, config_params: Any) -> Any:
    """Returns the configuration, which may come from three arguments.

    Raises:
        DeepSpeedConfigError: There is no configuration, or more than one.
    """
    given = {
        "initialize(config=...)": config,
        "initialize(config_params=...)": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise DeepSpeedConfigError(
            "initialize: there is no configuration; pass config=<dict or path>, or start the script with "
            "--deepspeed_config FILE and hand its arguments over as args"
        )
    raise DeepSpeedConfigError(f"initialize: the configuration is given more than once ({', '.join(found)}); keep one")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--deepspeed`` and ``--deepspeed_config`` to a parser and returns it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed", default=False, action="store_true", help="Enable DeepSpeed (for the script's use)"
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed configuration file")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


def device_rank(args: Any) -> int | None:
    """Returns ``args.device_rank``, the number of the device that the script requests; None if it requests none."""
    given = getattr(args, "device_rank", None)
    return None if given is None else int(given)


def local_rank_of(args: Any) -> int:
    """Returns this process's rank on its machine: ``args.device_rank``, else ``LOCAL_RANK``, else 0."""
    given = device_rank(args)
    return given if given is not None else int(os.environ.get("LOCAL_RANK", "0"))


def checked_model(model: object) -> nn.Module:
    """Returns ``model`` after a check that it is a module whose parameters have shapes.

    Raises:
        DeepSpeedConfigError: It is missing, no module, or has lazy parameters.
    """
    if model is None:
        raise DeepSpeedConfigError("initialize: model is missing; pass the torch.nn.Module to train as model=...")
    if not isinstance(model, nn.Module):
        raise DeepSpeedConfigError(f"initialize(model=...): expected a torch.nn.Module, found {type(model).__name__}")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise DeepSpeedConfigError(
            f"initialize(model=...): {', '.join(repr(name) for name in lazy[:5])} have no shape yet, as their modules "
            "are lazy; run one batch through the model before initialize"
        )
    return model


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the torch optimizer inside Accelerate's wrapper; any other object as it is.

    With a ``ParallelismConfig``, Accelerate wraps the optimizer before it calls ``initialize``. The update needs the
    class itself: it decides whether elements may be updated in flat runs.
    """
    wrapper = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    return optimizer.optimizer if wrapper is not None and isinstance(optimizer, wrapper) else optimizer
