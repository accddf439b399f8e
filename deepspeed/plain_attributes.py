"""Attributes of modules that change all the time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PlainAttributes:
    """For modules that count and note things in themselves several times in a step; before ``nn.Module`` in the bases.

    ``nn.Module`` looks for parameters, buffers and modules at every assignment, a dozen calls in each. What is a plain
    attribute and stays one is set without.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_plain = not isinstance(value, (torch.Tensor, nn.Module)) or type(value) is torch.Tensor
        if is_plain and name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)
