"""Which parameters are gathered as one unit, and which modules gather which buckets.

A unit is a repeated block: a child of a ``ModuleList`` or ``Sequential``. Parameters outside every block belong to the
unit of the module that owns them. A block that is larger than the granularity and itself holds blocks is taken apart,
unless it is marked as a leaf (``deepspeed.utils.set_z3_leaf_modules``).

A leaf module is gathered whole, with everything below it, because which of its children run depends on the data. The
marks count when a model is given to ``deepspeed.initialize`` at ZeRO stage 3; elsewhere they mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from deepspeed.config.sections.zero import LeafModule
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import logger
from deepspeed.zero.address import full_numel
from deepspeed.zero.bucket import Bucket

LEAF_FLAG = "_ds_z3_leaf"

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


# -- leaf modules ------------------------------------------------------------------------------------------------------


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks one module as a leaf, or takes the mark back.

    Args:
        model: The module itself.
        flag: Whether it is one.
    """
    if any(_has_engine(parameter) for parameter in model.parameters()):
        logger.warning(
            "set_z3_leaf_module: %s belongs to an engine already, whose units are made; mark leaf modules before "
            "deepspeed.initialize",
            type(model).__name__,
        )
    setattr(model, LEAF_FLAG, flag)


def _has_engine(parameter: torch.nn.Parameter) -> bool:
    address = parameter.__dict__.get("_ds_address")
    return address is not None and address.bucket.is_trained


def z3_leaf_module(model: nn.Module) -> bool:
    """Returns whether a module is marked as a leaf."""
    return bool(getattr(model, LEAF_FLAG, False))


def z3_leaf_parameter(model: torch.nn.Parameter) -> bool:
    """Returns whether a parameter is gathered together with a leaf module; known after ``initialize``.

    Args:
        model: The parameter; upstream calls it so.
    """
    address = model.__dict__.get("_ds_address")
    owner = None if address is None else address.bucket.owner
    return owner is not None and model in owner.leaf_parameters()


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Returns all modules of ``model`` that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks every module of the given classes.

    Args:
        model: Whose modules are searched, itself included.
        leaf_module_classes: Classes, names of classes, or their paths.
        raise_if_not_found: No such module is an error.

    Returns:
        The modules, in model order.

    Raises:
        DeepSpeedConfigError: There is none, or an entry is neither a class nor a name.
    """
    return _flag_classes(model, leaf_module_classes, True, raise_if_not_found, "set_z3_leaf_modules")


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes the marks of :func:`set_z3_leaf_modules` back; arguments and result as there."""
    return _flag_classes(model, leaf_module_classes, False, raise_if_not_found, "unset_z3_leaf_modules")


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by their names in ``named_modules()``.

    Args:
        model: Whose modules are searched.
        module_names: Names.
        flag: False: take the mark back.
        raise_if_not_found: None found is an error.

    Returns:
        ``(modules, names that no module has)``.

    Raises:
        DeepSpeedConfigError: No module was found.
    """
    return _flag_names(model, module_names, str.__eq__, flag, raise_if_not_found, "set_z3_leaf_modules_by_name")


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by the ends of their names; arguments and result as :func:`set_z3_leaf_modules_by_name`."""
    return _flag_names(
        model, module_name_suffixes, str.endswith, flag, raise_if_not_found, "set_z3_leaf_modules_by_suffix"
    )


def mark_leaf_modules(
    model: nn.Module, *, classes: Iterable[str], names: Iterable[str], suffixes: Iterable[str]
) -> list[str]:
    """Marks what a configuration names.

    Returns:
        Names and suffixes that fit no module; classes that are not there are passed over.
    """
    _flag_classes(model, classes, True, False, "leaf_module.classes")
    _, missing_names = _flag_names(model, names, str.__eq__, True, False, "leaf_module.names")
    _, missing_suffixes = _flag_names(model, suffixes, str.endswith, True, False, "leaf_module.name_suffixes")
    return [*missing_names, *missing_suffixes]


def _flag_classes(
    model: nn.Module, wanted: Iterable[type[nn.Module] | str], flag: bool, must_exist: bool, call: str
) -> list[nn.Module]:
    wanted = list(wanted)
    for entry in wanted:
        if not isinstance(entry, (str, type)):
            raise DeepSpeedConfigError(f"{call}: expected classes or names of classes, found {entry!r}")
    classes = tuple(entry for entry in wanted if isinstance(entry, type))
    texts = {entry for entry in wanted if isinstance(entry, str)}
    found = [module for module in model.modules() if isinstance(module, classes) or texts & _names_of(type(module))]
    if not found and must_exist:
        shown = ", ".join(entry if isinstance(entry, str) else entry.__name__ for entry in wanted)
        raise DeepSpeedConfigError(
            f"{call}: {type(model).__name__} has no module of the classes {shown or '(none given)'}; "
            "raise_if_not_found=False accepts that"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _names_of(kind: type) -> set[str]:
    return {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}


def _flag_names(
    model: nn.Module,
    wanted: Iterable[str],
    fits: Callable[[str, str], bool],
    flag: bool,
    must_exist: bool,
    call: str,
) -> tuple[list[nn.Module], list[str]]:
    found: dict[int, nn.Module] = {}
    missing: list[str] = []
    for text in wanted:
        fitting = [module for name, module in model.named_modules() if fits(name, text)]
        if not fitting:
            missing.append(text)
        found.update((id(module), module) for module in fitting)
    if not found and must_exist:
        raise DeepSpeedConfigError(
            f"{call}: no module of {type(model).__name__} fits {', '.join(missing) or '(none given)'}; "
            "raise_if_not_found=False accepts that"
        )
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing


def mark_configured_leaves(model: nn.Module, section: LeafModule) -> None:
    """Marks the modules that ``zero_optimization.leaf_module`` names.

    Raises:
        DeepSpeedConfigError: A class, name or suffix fits no module.
    """
    missing = mark_leaf_modules(model, classes=section.classes, names=section.names, suffixes=section.name_suffixes)
    if missing:
        raise DeepSpeedConfigError(
            f"zero_optimization.leaf_module: no module fits {', '.join(missing)}; names and name_suffixes are compared "
            "with those that model.named_modules() gives"
        )


# -- modules that are left out -----------------------------------------------------------------------------------------


class ParameterBlockMap:
    """Maps the parameters of each bucket to the blocks they belong to.

    Args:
        model: The model.
        buckets: Its buckets.
        blocks: Modules of the model that a forward may leave out.
    """

    def __init__(self, model: nn.Module, buckets: Iterable[Bucket], blocks: Sequence[nn.Module]) -> None:
        block_of = {module: number for number, block in enumerate(blocks) for module in block.modules()}
        owners: dict[nn.Parameter, set[int | None]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(parameter, set()).add(block_of.get(module))
        self._owners = {
            bucket.index: frozenset[int | None]().union(*(owners.get(parameter, {None}) for parameter in bucket.params))
            for bucket in buckets
        }

    def only_of(self, numbers: Iterable[int]) -> frozenset[int]:
        """Returns the buckets whose parameters belong to these blocks alone."""
        left_out = frozenset[int | None](numbers)
        return frozenset(index for index, owners in self._owners.items() if owners and owners <= left_out)
