"""The engine feature of a ``PipelineModule``."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from deepspeed.engine_feature import EngineFeature, EngineSetup
from deepspeed.logging import log_dist


class PipelineParallelism(EngineFeature):
    """Layers that are divided over stages."""

    title = "pipeline"
    setting = "deepspeed.pipe.PipelineModule"

    @override
    def prepare(self, setup: EngineSetup) -> None:
        model: Any = setup.model
        section = setup.root.pipeline
        if setup.has_stages:
            before = list(model.parameters())
            model.take_pipeline_config(section)
            if {id(parameter) for parameter in before} != {id(parameter) for parameter in model.parameters()}:
                model.replaced_parameters = [weakref.ref(parameter) for parameter in before if parameter.requires_grad]
        elif section.model_fields_set:
            log_dist(
                f"pipeline ({', '.join(sorted(section.model_fields_set))}) has no effect: expected a "
                f"deepspeed.pipe.PipelineModule, found {type(model).__name__}. Build one from its layers "
                "(PipelineModule.from_transformers for a Transformers model), or leave the section out",
                level=logging.WARNING,
            )

    @override
    def settle(self, setup: EngineSetup) -> Mapping[str, bool]:
        if setup.has_stages:
            model: Any = setup.model
            model.settle(setup.device)
        return {}

    @override
    def engine_class(self, setup: EngineSetup) -> str | None:
        return str(type(setup.model)._engine_class) if setup.has_stages else None  # type: ignore[attr-defined]


FEATURE = PipelineParallelism()
