"""From ``compression_training`` to the layers of a model: which technique acts on which layer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from torch import nn

from deepspeed.compression.techniques import Kind
from deepspeed.config import ParsedConfig, Root, parse
from deepspeed.config.sections.compression import CompressionTraining, Group, PruningGroup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.layers import is_conv1d

SECTION = "compression_training"
LINEAR = ("linear", "conv1d")
KINDS: dict[str, tuple[str, ...]] = {
    "weight_quantization": (*LINEAR, "conv2d", "embedding"),
    "activation_quantization": (*LINEAR, "conv2d"),
    "sparse_pruning": (*LINEAR, "conv2d"),
    "row_pruning": LINEAR,
    "head_pruning": LINEAR,
    "channel_pruning": ("conv2d",),
}
"""The kinds of layers that each technique supports, in the order in which techniques are made permanent."""
PRUNED: dict[str, Kind] = {
    "sparse_pruning": "sparse",
    "row_pruning": "row",
    "head_pruning": "head",
    "channel_pruning": "channel",
}


def kind_of(module: nn.Module) -> str | None:
    """Returns what kind of layer it is: a name in :data:`KINDS`, ``batchnorm2d``, or None for what stays as it is.

    Kinds made from these by inheritance may use their weight in ways of their own, so they stay as they are.
    """
    return kind_of_class(type(module))


def kind_of_class(found: type) -> str | None:
    """Returns the same of a class."""
    kinds = {nn.Linear: "linear", nn.Conv2d: "conv2d", nn.Embedding: "embedding", nn.BatchNorm2d: "batchnorm2d"}
    if (kind := kinds.get(found)) is not None:
        return kind
    return "conv1d" if is_conv1d(found) else None


class PatternMatch(NamedTuple):
    """One pattern of a group with what it fits.

    Attributes:
        names: Layers of the technique, in the model's order.
        related: For each related pattern, as many layers, in the same order.
    """

    names: list[str]
    related: list[list[str]]


@dataclass
class Selection:
    """One group of one technique, with its layers.

    Attributes:
        technique: Name of the technique's section.
        group: Name of the group.
        shared: The technique's shared settings.
        params: The group's settings.
        matches: By pattern.
    """

    technique: str
    group: str
    shared: Any
    params: Any
    matches: list[PatternMatch] = field(default_factory=list)

    @property
    def is_snip(self) -> bool:
        """Returns whether its layers are pruned by SNIP with momentum, which compares them with each other."""
        return is_snip(self.technique, self.shared)

    @property
    def names(self) -> list[str]:
        """All layers of the group."""
        return [name for match in self.matches for name in match.names]

    def key(self, name: str) -> str:
        """Returns the full name of one of the group's keys."""
        return f"{SECTION}.{self.technique}.different_groups.{self.group}.{name}"


def section_of(config: Any) -> CompressionTraining:
    """Returns the section of a configuration, checked.

    Args:
        config: A dict, a path, or what :func:`deepspeed.config.parse` returned.

    Raises:
        DeepSpeedConfigError: It is wrong, or there is no such section.
    """
    root: Root = (config if isinstance(config, ParsedConfig) else parse(config, purpose="compression")).root
    if root.compression_training is None:
        raise DeepSpeedConfigError(f"init_compression: the configuration has no section `{SECTION}`; add one")
    return root.compression_training


def techniques_of(section: CompressionTraining) -> Iterator[tuple[str, Any]]:
    """Yields the techniques that are switched on, by name, in order."""
    for name in KINDS:
        technique = getattr(section, name)
        if technique is not None and technique.shared_parameters.enabled:
            yield name, technique


def is_on(section: CompressionTraining | None) -> bool:
    """Returns whether the section does anything to a model's layers."""
    return section is not None and any(True for _ in techniques_of(section))


def select(model: nn.Module, section: CompressionTraining) -> list[Selection]:
    """Finds the layers of every group.

    Raises:
        DeepSpeedConfigError: A pattern is no regular expression or fits nothing, a layer is in two groups of one
            technique, or related layers are not as many as the layers they belong to.
    """
    modules = {name: module for name, module in model.named_modules() if kind_of(module) is not None}
    found = []
    for technique, settings in techniques_of(section):
        taken: dict[str, str] = {}
        for group_name, group in _groups_of(technique, settings).items():
            selection = Selection(technique, group_name, settings.shared_parameters, group.params)
            selection.matches = _matches(modules, selection, group)
            if selection.is_snip:
                selection.matches = _without_excluded(selection)
            for name in selection.names:
                if name in taken:
                    raise DeepSpeedConfigError(
                        f"{selection.key('modules')}: {name} is in the group {taken[name]!r} already; a layer can be "
                        "in one group of a technique. Patterns are searched in names, so `layer.1` fits `layer.10` "
                        r"too; write `layer\.1\.` for one of them"
                    )
                taken[name] = group_name
            found.append(selection)
    return found


def is_snip(technique: str, shared: Any) -> bool:
    """Returns whether a technique's shared settings select SNIP with momentum."""
    return technique == "sparse_pruning" and shared.method == "snip_momentum"


def _groups_of(technique: str, settings: Any) -> dict[str, Any]:
    """Returns the groups of a technique; SNIP takes all layers where none are named."""
    groups: dict[str, Any] = settings.different_groups
    return groups or ({"all": PruningGroup()} if is_snip(technique, settings.shared_parameters) else {})


def _without_excluded(selection: Selection) -> list[PatternMatch]:
    """Returns the matches without ``excluded_modules``, which are patterns too."""
    where = f"{SECTION}.{selection.technique}.shared_parameters.excluded_modules"
    excluded = [_compiled(pattern, where) for pattern in selection.shared.excluded_modules]
    names = [[name for name in match.names if not any(e.search(name) for e in excluded)] for match in selection.matches]
    if not any(names):
        raise DeepSpeedConfigError(f"{where}: leaves no layer of the group {selection.group!r}; name fewer")
    return [PatternMatch(kept, []) for kept in names]


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(".*" if pattern == "*" else pattern)
    except re.error as error:
        raise DeepSpeedConfigError(f"{where}: {pattern!r} is no regular expression: {error}; correct it") from error


def _matches(modules: dict[str, nn.Module], selection: Selection, group: Group) -> list[PatternMatch]:
    related = cast("list[list[str]]", group.related_modules or [[] for _ in group.modules])
    if len(related) != len(group.modules):
        raise DeepSpeedConfigError(
            f"{selection.key('related_modules')}: expected one list for each of the {len(group.modules)} entries of "
            f"modules, found {len(related)}"
        )
    matches = []
    for pattern, others in zip(group.modules, related, strict=True):
        names = _fitting(modules, pattern, selection.key("modules"), KINDS[selection.technique])
        match = PatternMatch(names, [])
        for other in others:
            where = selection.key("related_modules")
            found = _fitting(modules, other, where, (*LINEAR, "conv2d", "batchnorm2d"))
            if len(found) != len(names):
                raise DeepSpeedConfigError(
                    f"{where}: {other!r} fits {len(found)} layers ({_some(found)}), but {pattern!r} of modules fits "
                    f"{len(names)} ({_some(names)}); each layer needs its own. Write a pattern that fits one for each"
                )
            match.related.append(found)
        matches.append(match)
    return matches


def _fitting(modules: dict[str, nn.Module], pattern: str, where: str, kinds: tuple[str, ...]) -> list[str]:
    expression = _compiled(pattern, where)
    fitting = [name for name in modules if expression.search(name)]
    names = [name for name in fitting if kind_of(modules[name]) in kinds]
    if names:
        return names
    known = [name for name, module in modules.items() if kind_of(module) in kinds]
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
    hint = f"choose, for example, {_some(near)}" if near else f"it has none of {', '.join(kinds)}; leave the group out"
    other = f"; what it fits ({_some(fitting)}) is of another kind" if fitting else ""
    raise DeepSpeedConfigError(f"{where}: {pattern!r} fits no layer of the model{other}; {hint}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
