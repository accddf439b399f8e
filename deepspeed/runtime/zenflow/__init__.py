"""Upstream's import path of the modules below it."""

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.zenflow import zenflow_config as zenflow_config
    from deepspeed.runtime.zenflow import zenflow_stage_1_and_2 as zenflow_stage_1_and_2
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
