"""Marks frozen base weights that are sharded or offloaded at every ZeRO stage, and groups them for their buckets."""

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
    """Marks frozen parameters without engine as sharded over ``ranks`` ranks and gathered where they are used."""
    if ranks <= 1:
        return
    parameters = list(parameters)
    put_in_group(parameters, SHARED)
    for parameter in parameters:
        setattr(parameter, _RANKS, ranks)


def offload(parameters: Iterable[nn.Parameter], share: float) -> None:
    """Marks frozen parameters that live in host memory between uses.

    Args:
        share: Share of the bytes of all parameters marked with this value that is offloaded; 0: they are not marked.
    """
    if share > 0:
        for parameter in parameters:
            setattr(parameter, _SHARE, share)


def groups_of_bases(model: nn.Module, ranks: int) -> dict[str, bool]:
    """Groups bases of ``model``, returns True by used group; DeepSpeedConfigError for marks that do not fit."""
    found = {
        name: requested for name, p in model.named_parameters() if (requested := getattr(p, _RANKS, None)) is not None
    }
    for name, requested in found.items():
        if requested != ranks:
            raise DeepSpeedConfigError(
                f"LoRAConfig(base_weight_sharding={requested}) of {name!r}: expected the number of data-parallel ranks "
                f"({ranks}) or 1, found {requested}; use {ranks}, or 1 to keep base weights whole"
            )
    groups = {SHARED: True} if found else {}
    return groups | ({OFFLOADED: True} if _choose_offloaded(model) else {})


def _choose_offloaded(model: nn.Module) -> bool:
    """Groups the bases that are offloaded, in model order up to their share; returns whether there are any."""
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
    has_offloaded = False
    for share, parameters in requested.items():
        frozen = {id(p): full_numel(p) * p.element_size() for p in parameters.values() if not p.requires_grad}
        limit, moved = share * sum(frozen.values()), 0
        for parameter in parameters.values():
            leaves = id(parameter) in frozen and moved < limit
            moved += frozen[id(parameter)] if leaves else 0
            has_offloaded = has_offloaded or leaves
            on_device = SHARED if hasattr(parameter, _RANKS) else DATA
            put_in_group([parameter], OFFLOADED if leaves else on_device)
    return has_offloaded
