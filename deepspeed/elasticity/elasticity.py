"""``compute_elastic_config``: the batch that many numbers of ranks can share, for schedulers and launchers.

``deepspeed.initialize`` makes the same choice from the same section (:mod:`deepspeed.config.elastic_rules`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from deepspeed.config.elastic_batch import choose_batch
from deepspeed.config.elastic_rules import differences_from_scheduler
from deepspeed.elasticity.config import ElasticityConfig
from deepspeed.elasticity.constants import (
    DEEPSPEED_ELASTICITY_CONFIG,
    ELASTICITY,
    ENABLED,
    ENABLED_DEFAULT,
    LATEST_ELASTICITY_VERSION,
    MINIMUM_DEEPSPEED_VERSION,
)
from deepspeed.errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize
from deepspeed.logging import logger


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Returns whether the configuration has a section ``elasticity`` that is enabled."""
    section = ds_config.get(ELASTICITY)
    return isinstance(section, Mapping) and bool(section.get(ENABLED, ENABLED_DEFAULT))


def compute_elastic_config(
    ds_config: dict[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """Returns the batch size and the numbers of ranks that can share it. The same input gives the same output.

    Args:
        ds_config: The whole configuration; only its section ``elasticity`` is read.
        target_deepspeed_version: The release that will train; 0.3.8 or newer.
        world_size: Ranks that there are; 0 for ``WORLD_SIZE`` where one is needed. They must be able to share the
            batch.
        return_microbatch: Whether to return the micro-batch too where ``world_size`` is 0.

    Returns:
        Batch size in samples; numbers of ranks, ascending (version 0.2: of data-parallel ranks); and, with a
        ``world_size`` or ``return_microbatch``, the largest micro-batch for that number of ranks.

    Raises:
        ValueError: ``ds_config`` is no dict.
        ElasticityConfigError: The section is missing, disabled or wrong, or a number of ranks is needed.
        ElasticityError: No batch suits the section, or the target is too old.
        ElasticityIncompatibleWorldSize: These ranks cannot share the batch.
    """
    config = _read_section(ds_config)
    _check_target(target_deepspeed_version)
    needs_ranks = return_microbatch or config.version >= LATEST_ELASTICITY_VERSION
    ranks = world_size or (_world_size_of_environment() if needs_ranks else 0)
    size = config.model_parallel_size
    if ranks % size:
        raise ElasticityIncompatibleWorldSize(
            f"{ranks} ranks do not form groups of elasticity.model_parallel_size {size}; start a multiple of it"
        )
    choice = choose_batch(config.section, ranks // size or None)
    counts = list(choice.data_ranks)
    if world_size == 0 and not return_microbatch:
        return choice.train_batch_size, counts
    assert choice.micro_batch_size is not None, "the number of ranks is known"
    return choice.train_batch_size, counts, choice.micro_batch_size


def _read_section(ds_config: Any) -> ElasticityConfig:
    if not isinstance(ds_config, dict):
        raise ValueError(f"ds_config: expected a dict, found {type(ds_config).__name__}; read the file first")
    if not isinstance(ds_config.get(ELASTICITY), dict):
        raise ElasticityConfigError("ds_config: expected a section 'elasticity', found none; add it")
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError("elasticity.enabled: expected true, found false or nothing; set it to true")
    return ElasticityConfig(ds_config[ELASTICITY])


def _check_target(target: str) -> None:
    try:
        is_recent = Version(str(target)) >= Version(MINIMUM_DEEPSPEED_VERSION)
    except InvalidVersion:
        raise ElasticityError(
            f"target_deepspeed_version: expected a version such as 0.3.8, found {target!r}; correct it"
        ) from None
    if not is_recent:
        raise ElasticityError(
            f"target_deepspeed_version: expected {MINIMUM_DEEPSPEED_VERSION} or newer, found {target}; earlier "
            "releases have no elastic batch sizes"
        )


def _world_size_of_environment() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if not text.isdecimal() or int(text) < 1:
        raise ElasticityConfigError(
            f"world_size is 0 and WORLD_SIZE is {text or 'not set'}: expected the number of ranks, on which elasticity "
            "version 0.2 and the micro-batch depend; give world_size"
        )
    return int(text)


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Checks that the scheduler has read the same section: its ``DEEPSPEED_ELASTICITY_CONFIG`` holds it as JSON.

    Logs a warning where the variable is not set.

    Args:
        runtime_elastic_config_dict: The section of the run.

    Raises:
        ElasticityConfigError: ``max_train_batch_size``, ``micro_batch_sizes`` or ``version`` differ.
    """
    section = ElasticityConfig(runtime_elastic_config_dict).section
    text = os.environ.get(DEEPSPEED_ELASTICITY_CONFIG)
    if text is None:
        logger.warning(
            f"{DEEPSPEED_ELASTICITY_CONFIG} is not set, so the program that chose the number of ranks may have read "
            "another elasticity section than this run. Let it set the variable to its section"
        )
        return
    differences = differences_from_scheduler(section, text)
    if differences:
        raise ElasticityConfigError("; ".join(f"elasticity.{name}: {what}" for name, what in differences.items()))
