"""The engine feature of ``data_sampling.dynamic_batching``: loads batches of about equal numbers of tokens."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from deepspeed.data.batching.loading import get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed
from deepspeed.engine_feature import EngineFeature


class BatchesByTokens(EngineFeature):
    """Loads batches of about equal numbers of tokens, with learning rates for their sizes."""

    title = "batches by tokens"
    setting = "data_efficiency.data_sampling.dynamic_batching"

    @override
    def finish(self, engine: Any, training_data: Any) -> None:
        section = engine.data_efficiency_config()
        if training_data is None or section is None or not section.packs_tokens:
            return
        loader, scheduler, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(training_data, engine)
        engine.training_dataloader, engine.lr_scheduler = loader, scheduler
        if hasattr(type(engine), "set_dataloader"):  # an engine of a pipeline
            engine.set_dataloader(loader)


FEATURE = BatchesByTokens()
