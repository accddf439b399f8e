"""Writes training curves: TensorBoard, CSV, Weights & Biases, Comet. Each is one section of the configuration.

:mod:`.monitor` has the base class, one class for each destination, and :class:`MonitorMaster` for all of them.
"""

from __future__ import annotations

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.monitor import comet as comet
    from deepspeed.monitor import config as config
    from deepspeed.monitor import csv_monitor as csv_monitor
    from deepspeed.monitor import monitor as monitor
    from deepspeed.monitor import tensorboard as tensorboard
    from deepspeed.monitor import wandb as wandb
    from deepspeed.monitor.monitor import MonitorMaster as MonitorMaster

lazy_names(__name__)
