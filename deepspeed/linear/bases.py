"""Frozen base weights that ranks share or keep in host memory at every ZeRO stage: flags of their buckets."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.address import full_numel
from deepspeed.zero.tiling.describe import OFFLOADED, SHARED, describe, put_in_group
from deepspeed.zero.tiling.layout import DATA

_RANKS = "ds_base_ranks"
_SHARE = "ds_base_offloaded_share"


def share(parameters: Iterable[nn.Parameter], ranks: int) -> None:
    """Declares that each of ``ranks`` ranks keeps a slice of frozen parameters, which are gathered where they are used.

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


def offload(parameters: Iterable[nn.Parameter], share: float) -> None:
    """Declares that frozen parameters live in host memory between uses.

    Args:
        parameters: Before an engine takes them.
        share: Share of the bytes of all parameters declared with this share that is offloaded; 0: none.
    """
    if share > 0:
        for parameter in parameters:
            setattr(parameter, _SHARE, share)


def groups_of_bases(model: nn.Module, ranks: int) -> dict[str, bool]:
    """Puts the bases of ``model`` into their groups, and returns them.

    Args:
        model: Before an engine takes its parameters.
        ranks: The data-parallel ranks.

    Returns:
        Names of the groups: of shared bases, of those in host memory.

    Raises:
        DeepSpeedConfigError: They were to be shared by another number of ranks, or cannot leave the device.
    """
    found = {
        name: requested for name, p in model.named_parameters() if (requested := getattr(p, _RANKS, None)) is not None
    }
    for name, requested in found.items():
        if requested != ranks:
            raise DeepSpeedConfigError(
                f"LoRAConfig(base_weight_sharding={requested}) of {name!r}: the {ranks} data-parallel ranks share base "
                f"weights; give {ranks}, or 1 to keep them whole"
            )
    groups = {SHARED: True} if found else {}
    return groups | ({OFFLOADED: True} if _choose_offloaded(model) else {})


def _choose_offloaded(model: nn.Module) -> bool:
    """Puts the bases that leave the device into one group, in model order until their share is reached."""
    requested: dict[float, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if (share := getattr(parameter, _SHARE, None)) is not None:
            group = describe(name, parameter).group
            if group not in (DATA, SHARED, OFFLOADED) or getattr(parameter, "allreduce", True) is False:
                raise DeepSpeedConfigError(
                    f"LoRAConfig(offload=True) of {name!r}: not all data-parallel ranks have this weight, as it "
                    "belongs to an expert or is cut by tensor parallelism; leave offload and offload_ratio out there"
                )
            requested.setdefault(share, {})[name] = parameter
    some = False
    for share, parameters in requested.items():
        frozen = {id(p): full_numel(p) * p.element_size() for p in parameters.values() if not p.requires_grad}
        limit, moved = share * sum(frozen.values()), 0
        for parameter in parameters.values():
            leaves = id(parameter) in frozen and moved < limit
            moved += frozen[id(parameter)] if leaves else 0
            some = some or leaves
            if_kept = SHARED if hasattr(parameter, _RANKS) else DATA
            put_in_group([parameter], OFFLOADED if leaves else if_kept)
    return some
