"""Writes training curves: TensorBoard, CSV, Weights & Biases, Comet. Each is one section of the configuration.

:mod:`.monitor` has the base class, one class for each destination, and :class:`MonitorMaster` for all of them.
"""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {"deepspeed.monitor.monitor": "MonitorMaster"},
    submodules="comet config csv_monitor monitor tensorboard wandb",
)
