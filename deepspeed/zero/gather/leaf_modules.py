"""Leaf modules: marks of modules that are gathered whole, with everything below them.

Which children of such a module run depends on the data. The marks count when a model is given to
``deepspeed.initialize`` at ZeRO stage 3 (``zero.model_states`` makes one unit of each); elsewhere they mean nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import nn

from deepspeed.config.sections.zero import LeafModule
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist

LEAF_FLAG = "_z3_leaf"  # tests of Accelerate read it


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks a module as a leaf, whose parameters are gathered together; ``flag=False`` removes the mark."""
    addresses = (parameter.__dict__.get("_ds_address") for parameter in model.parameters())
    if any(address is not None and address.bucket.is_trained for address in addresses):
        log_dist(
            f"set_z3_leaf_module: {type(model).__name__} belongs to an engine already, which ignores the mark; "
            "mark leaf modules before deepspeed.initialize",
            level=logging.WARNING,
        )
    setattr(model, LEAF_FLAG, flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Returns whether a module is marked as a leaf."""
    return bool(getattr(model, LEAF_FLAG, False))


def z3_leaf_parameter(model: torch.nn.Parameter) -> bool:
    """Returns whether a parameter is gathered together with a leaf module; known after ``initialize``."""
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

    Returns:
        The modules, in model order.

    Raises:
        DeepSpeedConfigError: There is none, or an entry is neither a class nor a name.
    """
    return _flag_classes(model, leaf_module_classes, True, raise_if_not_found, "set_z3_leaf_modules")


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Removes the marks of :func:`set_z3_leaf_modules`; same arguments and result."""
    return _flag_classes(model, leaf_module_classes, False, raise_if_not_found, "unset_z3_leaf_modules")


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by their names in ``named_modules()``.

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
            f"zero_optimization.leaf_module: no module fits {', '.join(missing)}; correct them: names and "
            "name_suffixes are compared with those that model.named_modules() gives"
        )
