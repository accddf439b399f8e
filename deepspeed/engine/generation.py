"""The feature of engines that generate, and the cache that generation uses."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from typing_extensions import override

from deepspeed.accelerator import get_accelerator
from deepspeed.config.sections.root import Root
from deepspeed.engine_feature import STAGES, Conflict, EngineFeature, EngineSetup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist_once

_ON_HOST = {"offloaded": None, "offloaded_static": "static"}
"""Transformers' caches that keep keys and values in host memory, and the same caches for a model on the host."""


def with_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments of ``generate`` with a cache that this device can have.

    ``cache_implementation="offloaded"`` keeps keys and values in host memory and brings them layer by layer; without a
    device they are there anyway, so the ordinary cache of that kind does the same.
    """
    if get_accelerator().device_name() != "cpu":
        return arguments
    made = dict(arguments)
    config = made.get("generation_config")
    requested = made.get("cache_implementation") or getattr(config, "cache_implementation", None)
    if requested not in _ON_HOST:
        return arguments
    log_dist_once(f"generate: cache_implementation {requested!r} is the ordinary cache here, which is in host memory")
    made.pop("cache_implementation", None)
    if config is not None:
        config = made["generation_config"] = copy.deepcopy(config)
        config.cache_implementation = _ON_HOST[requested]
    elif _ON_HOST[requested] is not None:
        made["cache_implementation"] = _ON_HOST[requested]
    return made


def takes_synced_gpus(generate: Any) -> bool:
    """Returns whether a model's ``generate`` has the argument ``synced_gpus``, as those of Transformers have.

    With it, ranks that are done continue until all are, which gathers of sharded layers need.
    """
    parameters = inspect.signature(generate).parameters
    return "synced_gpus" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _generates(root: Root) -> bool:
    return root.hybrid_engine is not None and root.hybrid_engine.enabled


class Generation(EngineFeature):
    """An engine that generates between its training steps."""

    title = "hybrid engine"
    setting = "hybrid_engine"
    conflicts = (
        Conflict(
            "hybrid_engine.enabled",
            lambda setup: _generates(setup.root),
            STAGES,
            "a pipeline does not generate",
            "leave the section out, or the PipelineModule",
        ),
    )

    @override
    def refuse(self, setup: EngineSetup) -> None:
        if _generates(setup.root) and not callable(getattr(setup.model, "generate", None)):
            raise DeepSpeedConfigError(
                f"hybrid_engine.enabled: {type(setup.model).__name__} has no method generate; give a model that "
                "generates, or leave the section out"
            )

    @override
    def engine_class(self, setup: EngineSetup) -> str | None:
        return "deepspeed.engine.hybrid.DeepSpeedHybridEngine" if _generates(setup.root) else None


FEATURE = Generation()
