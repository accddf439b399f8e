"""Upstream's import path of the modules below it."""

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.data_pipeline import curriculum_scheduler as curriculum_scheduler
    from deepspeed.runtime.data_pipeline import data_routing as data_routing
    from deepspeed.runtime.data_pipeline import data_sampling as data_sampling
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
