"""Configuration; re-exports from :mod:`deepspeed.config` and :mod:`deepspeed.errors`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "DeepSpeedConfig": "deepspeed.config",
        "DeepSpeedConfigError": "deepspeed.errors",
        "load_ds_config": "deepspeed.config",
    },
)
