"""Writes training curves: TensorBoard, CSV, Weights & Biases, Comet. Each is one section of the configuration.

:mod:`.monitor` has the base class, one class for each destination, and :class:`MonitorMaster` for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.monitor import comet as comet
    from deepspeed.monitor import config as config
    from deepspeed.monitor import csv_monitor as csv_monitor
    from deepspeed.monitor import monitor as monitor
    from deepspeed.monitor import tensorboard as tensorboard
    from deepspeed.monitor import wandb as wandb
    from deepspeed.monitor.monitor import MonitorMaster as MonitorMaster
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
