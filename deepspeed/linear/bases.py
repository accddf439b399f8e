"""Frozen base weights that ranks share at every ZeRO stage: a flag of their buckets, as stage 3 is one of all."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.describe import SHARED, put_in_group

_RANKS = "ds_base_ranks"


def share(parameters: Iterable[nn.Parameter], ranks: int) -> None:
    """Says that each of ``ranks`` ranks keeps a slice of frozen parameters, which are gathered where they are used.

    Args:
        parameters: Before an engine takes them.
        ranks: All data-parallel ranks; 1: each keeps all.
    """
    if ranks <= 1:
        return
    parameters = list(parameters)
    put_in_group(parameters, SHARED)
    for parameter in parameters:
        setattr(parameter, _RANKS, ranks)


def shared_bases(model: nn.Module, ranks: int) -> dict[str, bool]:
    """The name of the group of shared bases where ``model`` has some.

    Args:
        model: Before an engine takes its parameters.
        ranks: The data-parallel ranks.

    Raises:
        DeepSpeedConfigError: They were to be shared by another number of ranks.
    """
    found = {name: asked for name, p in model.named_parameters() if (asked := getattr(p, _RANKS, None)) is not None}
    for name, asked in found.items():
        if asked != ranks:
            raise DeepSpeedConfigError(
                f"LoRAConfig(base_weight_sharding={asked}) of {name!r}: the {ranks} data-parallel ranks share base "
                f"weights; give {ranks}, or 1 to keep them whole"
            )
    return {SHARED: True} if found else {}
