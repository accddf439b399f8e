"""Torch's Adagrad for parameters that may be sharded already."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class Adagrad(torch.optim.Adagrad):
    """``torch.optim.Adagrad`` whose state is made at the first update, for the part of it that this rank holds.

    Torch's makes it at once and of each parameter's shape, for which a parameter that ``zero.Init`` has sharded has
    no values. Arguments and results are torch's; only ``step`` by itself, outside an engine, needs torch's class.

    Args:
        params: Parameters or group dictionaries.
        **settings: As for ``torch.optim.Adagrad``.
    """

    __signature__ = inspect.signature(torch.optim.Adagrad)

    def __init__(self, params: ParamsT, **settings: Any) -> None:
        probe = torch.optim.Adagrad([torch.zeros(1)], **settings)  # checks the settings
        self.__dict__.update({name: value for name, value in vars(probe).items() if name.startswith("_need")})
        torch.optim.Optimizer.__init__(self, params, probe.defaults)
