"""Selects the layers of a model to which each technique of ``compression_training`` applies."""

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
"""The kinds of layers that each technique supports, in the order in which techniques are installed."""
PRUNED: dict[str, Kind] = {
    "sparse_pruning": "sparse",
    "row_pruning": "row",
    "head_pruning": "head",
    "channel_pruning": "channel",
}


def kind_of(module: nn.Module) -> str | None:
    """Returns a layer's kind of :data:`KINDS`, ``batchnorm2d``, or None, also for subclasses, which may differ."""
    return kind_of_class(type(module))


def kind_of_class(found: type) -> str | None:
    """Returns the kind of the layers of a class, see :func:`kind_of`."""
    kinds = {nn.Linear: "linear", nn.Conv2d: "conv2d", nn.Embedding: "embedding", nn.BatchNorm2d: "batchnorm2d"}
    if (kind := kinds.get(found)) is not None:
        return kind
    return "conv1d" if is_conv1d(found) else None


class PatternMatch(NamedTuple):
    """One pattern of a group with the layers that it matches."""

    names: list[str]  # matched layers, in the model's order
    related: list[list[str]]  # for each related pattern, the related layer of each of ``names``, in the same order


@dataclass
class Selection:
    """One group of one technique, with its layers."""

    technique: str  # name of the technique's section
    group: str  # name of the group
    shared: Any  # the technique's shared settings
    params: Any  # the group's settings
    matches: list[PatternMatch] = field(default_factory=list)  # the matched layers, one entry for each pattern

    @property
    def is_snip(self) -> bool:
        """Whether its layers are pruned by SNIP with momentum, which compares them with each other."""
        return is_snip(self.technique, self.shared)

    @property
    def names(self) -> list[str]:
        """Names of all layers of the group."""
        return [name for match in self.matches for name in match.names]

    def key(self, name: str) -> str:
        """Returns the dotted path of one of the group's keys, for messages."""
        return f"{SECTION}.{self.technique}.different_groups.{self.group}.{name}"


def section_of(config: Any) -> CompressionTraining:
    """Returns the section ``compression_training``; DeepSpeedConfigError where there is none or it is invalid."""
    root: Root = (config if isinstance(config, ParsedConfig) else parse(config, purpose="compression")).root
    if root.compression_training is None:
        raise DeepSpeedConfigError(
            f"init_compression: expected a section `{SECTION}` in the configuration, found none; add one"
        )
    return root.compression_training


def techniques_of(section: CompressionTraining) -> Iterator[tuple[str, Any]]:
    """Yields the enabled techniques as ``(name, settings)``, in the order of :data:`KINDS`."""
    for name in KINDS:
        technique = getattr(section, name)
        if technique is not None and technique.shared_parameters.enabled:
            yield name, technique


def is_on(section: CompressionTraining | None) -> bool:
    """Returns whether the section enables any technique."""
    return section is not None and any(True for _ in techniques_of(section))


def select(model: nn.Module, section: CompressionTraining) -> list[Selection]:
    """Finds each group's layers; raises DeepSpeedConfigError where patterns, groups or related layers do not fit."""
    modules = {name: module for name, module in model.named_modules() if kind_of(module) is not None}
    found = []
    for technique, settings in techniques_of(section):
        taken: dict[str, str] = {}
        groups: dict[str, Any] = settings.different_groups
        if not groups and is_snip(technique, settings.shared_parameters):
            groups = {"all": PruningGroup()}  # of all layers
        for group_name, group in groups.items():
            selection = Selection(technique, group_name, settings.shared_parameters, group.params)
            selection.matches = _matches(modules, selection, group)
            if selection.is_snip:
                where = f"{SECTION}.{selection.technique}.shared_parameters.excluded_modules"
                excluded = [_compiled(pattern, where) for pattern in selection.shared.excluded_modules]
                names = [
                    [name for name in match.names if not any(e.search(name) for e in excluded)]
                    for match in selection.matches
                ]
                if not any(names):
                    raise DeepSpeedConfigError(
                        f"{where}: excludes all layers of the group {selection.group!r}; exclude fewer"
                    )
                selection.matches = [PatternMatch(kept, []) for kept in names]
            for name in selection.names:
                if name in taken:
                    raise DeepSpeedConfigError(
                        f"{selection.key('modules')}: {name} is in the group {taken[name]!r} already; a layer can be "
                        "in one group of a technique. Patterns match anywhere in a name, so `layer.1` matches "
                        r"`layer.10` too; write `layer\.1\.` instead"
                    )
                taken[name] = group_name
            found.append(selection)
    return found


def is_snip(technique: str, shared: Any) -> bool:
    """Returns whether a technique's shared settings select SNIP with momentum."""
    return technique == "sparse_pruning" and shared.method == "snip_momentum"


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(".*" if pattern == "*" else pattern)
    except re.error as error:
        raise DeepSpeedConfigError(f"{where}: {pattern!r} is not a regular expression: {error}; correct it") from error


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
                    f"{where}: {other!r} matches {len(found)} layers ({_some(found)}), but {pattern!r} of modules "
                    f"matches {len(names)} ({_some(names)}). Write a pattern that matches one related layer for each"
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
    other = f" of the kinds {', '.join(kinds)} (it matches {_some(fitting)})" if fitting else ""
    raise DeepSpeedConfigError(f"{where}: {pattern!r} matches no layer of the model{other}; {hint}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
