"""Upstream's import path of the modules below it."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.zenflow import zenflow_config as zenflow_config
    from deepspeed.runtime.zenflow import zenflow_stage_1_and_2 as zenflow_stage_1_and_2

lazy_names(__name__)
