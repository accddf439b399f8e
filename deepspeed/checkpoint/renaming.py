"""A checkpoint of one kind of model under the names that another kind has for the same weights.

A pipeline names its parameters by the number of the layer, a Transformers model by the path of the module. What the
beginnings of names become is known where these models are built; here they are only applied.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from deepspeed.checkpoint.source import CheckpointSource, SavedBuffer, SavedParameter

_PIPELINE = re.compile(r"(\d+|tied_modules\.[^.]+)\..+")
_SHOWN = 3


@dataclass(frozen=True)
class SavedNames:
    """What a checkpoint has, by the names to match.

    Attributes:
        parameters: Each knows the name that it has in the checkpoint.
        buffers: Each knows the name that it has in the checkpoint.
        aliases: Further names of tied tensors.
        left_out: Parameters that the checkpoint has not, on purpose.
    """

    parameters: Mapping[str, SavedParameter]
    buffers: Mapping[str, SavedBuffer]
    aliases: Mapping[str, str]
    left_out: Collection[str]


def renamed(source: CheckpointSource, beginnings: Mapping[str, str]) -> SavedNames | None:
    """Returns the names of a checkpoint with other beginnings; None where a parameter begins with none of them.

    Args:
        source: The checkpoint.
        beginnings: Beginnings of its names, to those in the model. The longest that fits is taken.
    """
    in_order = sorted(beginnings, key=len, reverse=True)

    def other(name: str) -> str | None:
        found = next((begin for begin in in_order if name.startswith(begin)), None)
        return None if found is None else beginnings[found] + name.removeprefix(found)

    parameters = {other(name): saved for name, saved in source.parameters.items()}
    if None in parameters or not parameters:
        return None
    buffers = {other(name): saved for name, saved in source.buffers.items()}
    aliases = {other(alias): other(name) for alias, name in source.aliases.items()}
    return SavedNames(
        {name: saved for name, saved in parameters.items() if name is not None},
        {name if name is not None else saved.name: saved for name, saved in buffers.items()},
        {alias: name for alias, name in aliases.items() if alias is not None and name is not None},
        {name for left in source.left_out if (name := other(left)) is not None},
    )


def kind_of_names(names: Iterable[str]) -> str:
    """Returns what kind of model has these names, with a few of them, for messages."""
    shown = list(names)
    some = ", ".join(repr(name) for name in shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")
    if shown and all(_PIPELINE.fullmatch(name) for name in shown):
        return f"a pipeline or a row of layers ({some})"
    return f"one module ({some})"
