"""Whether an engine shall generate, and whether its model can."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.config.sections.root import Root
from deepspeed.engine.rooms import is_pipeline
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist_once

_ON_HOST = {"offloaded": None, "offloaded_static": "static"}
"""Transformers' caches that keep keys and values in host memory, with what they are where the model computes there."""


def generates(root: Root) -> bool:
    """Whether the configuration asks for an engine that generates."""
    return root.hybrid_engine is not None and root.hybrid_engine.enabled


def refuse_what_cannot_generate(root: Root, model: nn.Module) -> None:
    """Whether the model can do what ``hybrid_engine`` asks for.

    Raises:
        DeepSpeedConfigError: It cannot.
    """
    if not generates(root):
        return
    if is_pipeline(model):
        raise DeepSpeedConfigError(
            "hybrid_engine.enabled: a pipeline does not generate; leave the section out, or the PipelineModule"
        )
    if not callable(getattr(model, "generate", None)):
        raise DeepSpeedConfigError(
            f"hybrid_engine.enabled: {type(model).__name__} has no method generate; give a model that generates, or "
            "leave the section out"
        )


def with_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``generate`` with a cache that this device can have.

    ``cache_implementation="offloaded"`` keeps keys and values in host memory and brings them layer by layer; without a
    device they lie there anyway, and the ordinary cache of that kind is the same.

    Args:
        arguments: As the caller gave them; not changed.
    """
    if get_accelerator().device_name() != "cpu":
        return arguments
    made = dict(arguments)
    config = made.get("generation_config")
    asked = made.get("cache_implementation") or getattr(config, "cache_implementation", None)
    if asked not in _ON_HOST:
        return arguments
    log_dist_once(f"generate: cache_implementation {asked!r} is the ordinary cache here, which is in host memory")
    made.pop("cache_implementation", None)
    if config is not None:
        config = made["generation_config"] = copy.deepcopy(config)
        config.cache_implementation = _ON_HOST[asked]
    elif _ON_HOST[asked] is not None:
        made["cache_implementation"] = _ON_HOST[asked]
    return made
