"""Writes training curves: TensorBoard, CSV, Weights & Biases, Comet. Each is one section of the configuration.

Start with ``monitor`` (all of them behind one call) and ``sink`` (what one of them is).
"""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {"MonitorMaster": "deepspeed.monitor.monitor"},
    submodules=["comet", "config", "csv_monitor", "monitor", "tensorboard", "wandb"],
)
