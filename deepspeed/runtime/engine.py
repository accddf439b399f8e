"""The engine; re-exports from :mod:`deepspeed.engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"]

DeepSpeedOptimizerCallable: TypeAlias = Callable[[Iterable[nn.Parameter] | dict[str, Any]], Optimizer]
DeepSpeedSchedulerCallable: TypeAlias = Callable[[Optimizer], Any]
