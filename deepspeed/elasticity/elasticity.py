"""``compute_elastic_config``: chooses a batch size for many numbers of ranks, for schedulers and launchers.

``deepspeed.initialize`` makes the same choice from the same section (:mod:`deepspeed.config.elastic_rules`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from deepspeed.config import parse
from deepspeed.config.config_attribute import AttributeBuilder
from deepspeed.config.elastic_batch import choose_batch
from deepspeed.config.elastic_rules import differences_from_scheduler
from deepspeed.config.sections.elasticity import Elasticity
from deepspeed.config.types import to_bool
from deepspeed.errors import (
    DeepSpeedConfigError,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from deepspeed.logging import log_dist

ELASTICITY = "elasticity"
ENABLED = "enabled"
ENABLED_DEFAULT = False
LATEST_ELASTICITY_VERSION = 0.2
MINIMUM_DEEPSPEED_VERSION = "0.3.8"
DEEPSPEED_ELASTICITY_CONFIG = "DEEPSPEED_ELASTICITY_CONFIG"


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Returns whether the configuration has a section ``elasticity`` that is enabled."""
    section = ds_config.get(ELASTICITY)
    return isinstance(section, Mapping) and _is_switched_on(section)


def _is_switched_on(section: Mapping[str, Any]) -> bool:
    """Returns the switch in any of its spellings; False for a value that is none, which the parser refuses."""
    try:
        return to_bool(section.get(ENABLED, ENABLED_DEFAULT))
    except ValueError:
        return False


def compute_elastic_config(
    ds_config: dict[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """Returns the batch size and the numbers of ranks that can use it. Equal inputs give equal outputs.

    Args:
        ds_config: The whole configuration; only its section ``elasticity`` is read.
        target_deepspeed_version: The release that will train; 0.3.8 or newer.
        world_size: Number of ranks; it must be able to use the batch. With 0, the environment variable ``WORLD_SIZE``
            is read if a number of ranks is needed (version 0.2, or ``return_microbatch``).
        return_microbatch: Whether to return the micro-batch too where ``world_size`` is 0.

    Returns:
        Batch size in samples; numbers of ranks, ascending (version 0.2: of data-parallel ranks); and, with a
        ``world_size`` or ``return_microbatch``, the largest micro-batch for that number of ranks.

    Raises:
        ValueError: ``ds_config`` is no dict.
        ElasticityConfigError: The section is missing, disabled or invalid, or a number of ranks is needed but not set.
        ElasticityError: No batch suits the section, or the target is too old.
        ElasticityIncompatibleWorldSize: This number of ranks cannot use the batch.
    """
    config = _read_section(ds_config)
    _check_target(target_deepspeed_version)
    needs_ranks = return_microbatch or config.version >= LATEST_ELASTICITY_VERSION
    ranks = world_size or (_world_size_of_environment() if needs_ranks else 0)
    size = config.model_parallel_size
    if ranks < 0 or ranks % size:
        raise ElasticityIncompatibleWorldSize(
            f"world_size={ranks}: expected a positive multiple of elasticity.model_parallel_size {size}; start such a "
            "number"
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
    """Checks that the scheduler uses the same section, which it writes to ``DEEPSPEED_ELASTICITY_CONFIG`` as JSON.

    Logs a warning if the variable is not set.

    Raises:
        ElasticityConfigError: ``max_train_batch_size``, ``micro_batch_sizes`` or ``version`` differ.
    """
    section = ElasticityConfig(runtime_elastic_config_dict).section
    text = os.environ.get(DEEPSPEED_ELASTICITY_CONFIG)
    if text is None:
        log_dist(
            f"{DEEPSPEED_ELASTICITY_CONFIG} is not set, so the program that chose the number of ranks may have read "
            "another elasticity section than this run. Let that program set the variable to its section",
            level=logging.WARNING,
        )
        return
    differences = differences_from_scheduler(section, text)
    if differences:
        raise ElasticityConfigError("; ".join(f"elasticity.{name}: {what}" for name, what in differences.items()))


def is_torch_elastic_compatible() -> bool:
    """Returns True: every supported torch has the elastic agent (1.11 and newer)."""
    return True


def _section(config: ElasticityConfig) -> Elasticity:
    return config.section


_at = AttributeBuilder(_section)


class ElasticityConfig:
    """The validated section, with the attribute names that schedulers read.

    Raises:
        ElasticityConfigError: A value is invalid, or a key that an enabled section needs is missing.
    """

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        self._given = dict(param_dict)
        others = {} if _is_switched_on(self._given) else {"train_batch_size": 1}
        try:
            section = parse({**others, "elasticity": self._given}).root.elasticity
        except DeepSpeedConfigError as error:
            raise ElasticityConfigError(str(error), error.problems) from None
        assert section is not None, "it was given"
        self.section: Elasticity = section  # the values, with the names of their configuration keys

    enabled = _at(lambda section: section.enabled, "Whether the section chooses the batch.")
    max_acceptable_batch_size = _at(
        lambda section: section.max_train_batch_size, "``max_train_batch_size``, in samples."
    )
    micro_batches = _at(lambda section: section.micro_batch_sizes, "``micro_batch_sizes``, in samples.")
    min_gpus = _at(lambda section: section.min_gpus, "Minimum number of ranks.")
    max_gpus = _at(lambda section: section.max_gpus, "Maximum number of ranks.")
    num_gpus_per_node = _at(lambda section: section.num_gpus_per_node, "Ranks per node, for version 0.2.")
    model_parallel_size = _at(
        lambda section: section.model_parallel_size, "Ranks that process the same samples; for version 0.2."
    )
    min_time = _at(lambda section: section.min_time, "``min_time``, in minutes; without effect.")
    version = _at(lambda section: section.version, "Version of the algorithm, 0.1 or 0.2.")
    prefer_larger_batch_size = _at(
        lambda section: section.prefer_larger_batch, "Whether the larger of two equally good sizes is chosen."
    )
    ignore_non_elastic_batch_info = _at(
        lambda section: section.ignore_non_elastic_batch_info, "Whether other batch sizes are ignored."
    )

    def repr(self) -> dict[str, Any]:
        """Returns the section as it was given."""
        return self._given

    def __repr__(self) -> str:
        return json.dumps(self._given, sort_keys=True, indent=4)
