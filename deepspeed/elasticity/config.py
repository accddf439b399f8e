"""``ElasticityConfig``: the section ``elasticity`` under the attribute names that schedulers read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deepspeed.config import parse
from deepspeed.config.sections.elasticity import Elasticity
from deepspeed.errors import (
    DeepSpeedConfigError,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)

__all__ = ["ElasticityConfig", "ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize"]


class ElasticityConfig:
    """The checked section.

    Args:
        param_dict: The section as a dict.

    Attributes:
        section: The values by the names of their keys.

    Raises:
        ElasticityConfigError: A value is wrong, or one is missing that an enabled section needs.
    """

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        self._given = dict(param_dict)
        others = {} if self._given.get("enabled") is True else {"train_batch_size": 1}
        try:
            section = parse({**others, "elasticity": self._given}).root.elasticity
        except DeepSpeedConfigError as error:
            raise ElasticityConfigError(str(error), error.problems) from None
        assert section is not None, "it was given"
        self.section: Elasticity = section

    @property
    def enabled(self) -> bool:
        """Whether the section chooses the batch."""
        return self.section.enabled

    @property
    def max_acceptable_batch_size(self) -> int:
        """``max_train_batch_size``, in samples."""
        return self.section.max_train_batch_size

    @property
    def micro_batches(self) -> list[int]:
        """``micro_batch_sizes``, in samples."""
        return self.section.micro_batch_sizes

    @property
    def min_gpus(self) -> int:
        """Least number of ranks."""
        return self.section.min_gpus

    @property
    def max_gpus(self) -> int:
        """Greatest number of ranks."""
        return self.section.max_gpus

    @property
    def num_gpus_per_node(self) -> int:
        """Ranks per node, for version 0.2."""
        return self.section.num_gpus_per_node

    @property
    def model_parallel_size(self) -> int:
        """Ranks that see the same samples, for version 0.2."""
        return self.section.model_parallel_size

    @property
    def min_time(self) -> int:
        """``min_time``, in minutes; without effect."""
        return self.section.min_time

    @property
    def version(self) -> float:
        """The algorithm, 0.1 or 0.2."""
        return self.section.version

    @property
    def prefer_larger_batch_size(self) -> bool:
        """Whether ties are broken upwards."""
        return self.section.prefer_larger_batch

    @property
    def ignore_non_elastic_batch_info(self) -> bool:
        """Whether batch keys elsewhere are let pass."""
        return self.section.ignore_non_elastic_batch_info

    def repr(self) -> dict[str, Any]:
        """Returns the section as it was given."""
        return self._given

    def __repr__(self) -> str:
        return json.dumps(self._given, sort_keys=True, indent=4)
