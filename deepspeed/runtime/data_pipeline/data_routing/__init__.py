"""Upstream's import path of the modules below it."""

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.data_pipeline.data_routing import basic_layer as basic_layer
    from deepspeed.runtime.data_pipeline.data_routing import helper as helper
    from deepspeed.runtime.data_pipeline.data_routing import scheduler as scheduler
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
