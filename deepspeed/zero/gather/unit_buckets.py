"""Which modules gather which buckets: units, leaf modules, and those between the root and the units."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from deepspeed.zero.bucket import Bucket
from deepspeed.zero.gather.leaf import get_z3_leaf_modules
from deepspeed.zero.gather.units import Unit


def buckets_of_leaves(model: nn.Module, sharded: Sequence[Bucket]) -> dict[nn.Module, list[Bucket]]:
    """The leaf modules with everything sharded that they use, tied weights of other units included."""
    holders = {parameter: bucket for bucket in sharded for parameter in bucket.params}
    found = {}
    for module in get_z3_leaf_modules(model):
        used = {holders[parameter] for parameter in module.parameters() if parameter in holders}
        found[module] = sorted(used, key=lambda bucket: bucket.index)
    return found


def gathering_modules(
    model: nn.Module,
    units: Sequence[Unit],
    indices: Sequence[Sequence[int]],
    buckets: Sequence[Bucket],
    leaves: dict[nn.Module, list[Bucket]],
) -> list[tuple[nn.Module, list[Bucket]]]:
    """Modules whose forward is a scope, with the sharded buckets that it needs.

    Args:
        model: The model.
        units: What is gathered together.
        indices: For each unit, its buckets.
        buckets: All of them.
        leaves: What :func:`buckets_of_leaves` returned.
    """
    found = dict(leaves)
    for unit, own in zip(units, indices, strict=True):
        found.setdefault(unit.module, [buckets[i] for i in own if buckets[i].is_sharded])
    between = _between_root_and_units(model, units, [bucket for bucket in buckets if bucket.is_sharded])
    return [*between, *((module, needed) for module, needed in found.items() if needed)]


def _between_root_and_units(
    model: nn.Module, units: Sequence[Unit], sharded: Sequence[Bucket]
) -> list[tuple[nn.Module, list[Bucket]]]:
    """Modules of which one called by itself (an encoder) is the outermost forward then."""
    known = {unit.module for unit in units}
    for unit in units:
        if not unit.is_flat:
            known.update(unit.module.modules())
    params = {parameter for bucket in sharded for parameter in bucket.params}
    return [
        (module, [])
        for module in model.modules()
        if module not in known and any(parameter in params for parameter in module.parameters())
    ]
