"""Upstream's import path of the modules below it."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.data_pipeline import curriculum_scheduler as curriculum_scheduler
    from deepspeed.runtime.data_pipeline import data_routing as data_routing
    from deepspeed.runtime.data_pipeline import data_sampling as data_sampling

lazy_names(__name__)
