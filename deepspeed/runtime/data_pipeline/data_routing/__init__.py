"""Upstream's import path of the modules below it."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.data_pipeline.data_routing import basic_layer as basic_layer
    from deepspeed.runtime.data_pipeline.data_routing import helper as helper
    from deepspeed.runtime.data_pipeline.data_routing import scheduler as scheduler

lazy_names(__name__)
