"""Upstream's import path of the modules below it."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.data_pipeline.data_sampling import data_analyzer as data_analyzer
    from deepspeed.runtime.data_pipeline.data_sampling import data_sampler as data_sampler
    from deepspeed.runtime.data_pipeline.data_sampling import indexed_dataset as indexed_dataset
    from deepspeed.runtime.data_pipeline.data_sampling import variable_batch_size_and_lr as variable_batch_size_and_lr

lazy_names(__name__)
