"""The configuration (``ds_config``): strict models, one per section, and :func:`parse`, which reads any source."""

from __future__ import annotations

from deepspeed.config.batch import BatchSizes, resolve_batch
from deepspeed.config.config_object import DeepSpeedConfig
from deepspeed.config.parsing import ParsedConfig, parse
from deepspeed.config.sections.root import Root
from deepspeed.config.source import load_ds_config

__all__ = ["BatchSizes", "DeepSpeedConfig", "ParsedConfig", "Root", "load_ds_config", "parse", "resolve_batch"]
