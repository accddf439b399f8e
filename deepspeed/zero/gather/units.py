"""Which parameters are gathered as one unit, and which modules gather which buckets.

A unit is a repeated block: a child of a ``ModuleList`` or ``Sequential``. Parameters outside every block belong to the
unit of the module that owns them. A block that is larger than the granularity and itself holds blocks is taken apart,
unless it is marked as a leaf (``deepspeed.utils.set_z3_leaf_modules``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from deepspeed.zero.address import full_numel
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.gather.leaf import get_z3_leaf_modules, z3_leaf_module

_CONTAINERS = (nn.ModuleList, nn.Sequential)


@dataclass
class Unit:
    """Parameters that are gathered together for the forward of one module.

    Attributes:
        name: Qualified name of the module; empty for the root.
        module: The module whose forward needs the parameters.
        params: Qualified name to parameter, in model order; a tied parameter belongs to its first owner.
    """

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def is_flat(self) -> bool:
        """Returns whether all parameters are the module's own, none of a module below it."""
        own = {id(parameter) for parameter in self.module._parameters.values()}
        return all(id(parameter) in own for parameter in self.params.values())


def find_units(model: nn.Module, granularity: int) -> list[Unit]:
    """Cuts ``model`` into units, in model order; units without parameters are left out.

    Args:
        model: The model.
        granularity: Elements up to which a block is never taken apart.
    """
    seen: set[int] = set()
    units = [_fill(unit, seen) for unit in _walk(model, "", granularity, inside_container=False)]
    return [unit for unit in units if unit.params]


def _walk(module: nn.Module, name: str, granularity: int, *, inside_container: bool) -> Iterator[tuple[Unit, bool]]:
    """Yields units and whether each takes the parameters of its whole subtree."""
    if z3_leaf_module(module):
        yield Unit(name, module), True
        return
    if inside_container and not (_numel(module) > granularity and _holds_blocks(module)):
        yield Unit(name, module), True
        return
    if next(module.parameters(recurse=False), None) is not None:
        yield Unit(name, module), False
    is_container = isinstance(module, _CONTAINERS) or getattr(module, "holds_blocks", False)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        yield from _walk(child, path, granularity, inside_container=is_container)


def _fill(found: tuple[Unit, bool], seen: set[int]) -> Unit:
    unit, whole = found
    for name, parameter in unit.module.named_parameters(recurse=whole):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            unit.params[f"{unit.name}.{name}" if unit.name else name] = parameter
    return unit


def _holds_blocks(module: nn.Module) -> bool:
    return any(
        isinstance(child, _CONTAINERS) and _numel(child) > 0 for child in module.modules() if child is not module
    )


def _numel(module: nn.Module) -> int:
    return sum(full_numel(parameter) for parameter in module.parameters())


def buckets_of_leaves(model: nn.Module, sharded: Sequence[Bucket]) -> dict[nn.Module, list[Bucket]]:
    """Returns the leaf modules with every sharded bucket that they use, tied weights of other units included."""
    bucket_of = {parameter: bucket for bucket in sharded for parameter in bucket.params}
    found = {}
    for module in get_z3_leaf_modules(model):
        used = {bucket_of[parameter] for parameter in module.parameters() if parameter in bucket_of}
        found[module] = sorted(used, key=lambda bucket: bucket.index)
    return found


def gathering_modules(
    model: nn.Module,
    units: Sequence[Unit],
    indices: Sequence[Sequence[int]],
    buckets: Sequence[Bucket],
    leaves: dict[nn.Module, list[Bucket]],
) -> list[tuple[nn.Module, list[Bucket]]]:
    """Returns the modules whose forward gathers buckets, with these; first those that only mark an outermost forward.

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
    """Returns modules between the root and the units, such as an encoder: a program may call one by itself."""
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
