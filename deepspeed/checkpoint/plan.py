"""Plans a load: matches model and checkpoint, and lists what this rank needs. Reads and changes nothing.

Matching is by the name of the logical parameter: neither the order of parameters, nor their param groups, nor how
either side is cut matters.

A checkpoint of one kind of model may be read under the names that another kind has for the same weights.

A pipeline names its parameters by the number of the layer, a Transformers model by the path of the module. The code
that builds these models provides the mapping of name prefixes, which is applied here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from deepspeed.checkpoint.format import COMPUTE, MASTER, optimizer_kind, state_of_kind
from deepspeed.checkpoint.source import CheckpointSource, SavedBuffer, SavedParameter, Wanted
from deepspeed.zero.tiling.layout import BucketLayout
from deepspeed.zero.tiling.tiles import Tile

_PIPELINE = re.compile(r"(\d+|tied_modules\.[^.]+)\..+")
_NAMES_IN_A_MESSAGE = 3


@dataclass(frozen=True)
class SavedNames:
    """Lists the parameters and buffers of a checkpoint by the names to match."""

    parameters: Mapping[str, SavedParameter]  # each has the name that it has in the checkpoint
    buffers: Mapping[str, SavedBuffer]  # each has the name that it has in the checkpoint
    aliases: Mapping[str, str]  # further names of tied tensors
    left_out: Collection[str]  # parameters that the checkpoint has not, on purpose


def renamed(source: CheckpointSource, beginnings: Mapping[str, str]) -> SavedNames | None:
    """Returns a checkpoint's names with the longest matching prefix replaced; None if a parameter has none of them."""
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
    some = ", ".join(repr(name) for name in shown[:_NAMES_IN_A_MESSAGE]) + (
        ", ..." if len(shown) > _NAMES_IN_A_MESSAGE else ""
    )
    if shown and all(_PIPELINE.fullmatch(name) for name in shown):
        return f"a pipeline or a sequence of layers ({some})"
    return f"one module ({some})"


_SHOWN = 40


@dataclass
class Mismatch:
    """Lists the differences between a model and a checkpoint."""

    # parameters and buffers that the model has and the checkpoint has not
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)  # the other way round
    # name to (shape in the model, shape in the checkpoint)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)  # those of ``missing`` that were left out on purpose when saving

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes)

    def table(self) -> str:
        """Returns a table with one line per difference."""
        rows = []
        for name, (ours, theirs) in self.shapes.items():
            rows.append(("shape", name, f"model {tuple(ours)}, checkpoint {tuple(theirs)}"))
        for name in self.missing:
            reason = "saved without frozen parameters" if name in self.left_out else "not in the checkpoint"
            rows.append(("missing", name, reason))
        rows += [("unexpected", name, "not in the model") for name in self.unexpected]
        more = [f"  ... and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
        width = max((len(name) for _, name, _ in rows[:_SHOWN]), default=0)
        return "\n".join([f"  {kind:<10} {name:<{width}}  {text}" for kind, name, text in rows[:_SHOWN]] + more)


@dataclass(frozen=True)
class ParameterMatch:
    """A parameter of the model and the one of the checkpoint that fills it."""

    name: str
    saved: SavedParameter

    @property
    def weights(self) -> str:
        """The kind that has the best values."""
        return MASTER if MASTER in self.saved.kinds else COMPUTE

    def states(self) -> dict[str, torch.dtype]:
        """Returns the dtype of each per-element optimizer state that the checkpoint has."""
        return {state: dtype for kind, dtype in self.saved.kinds.items() if (state := state_of_kind(kind)) is not None}


def match(
    source: CheckpointSource | SavedNames,
    shapes: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, str],
    buffers: Mapping[str, torch.Tensor],
) -> tuple[dict[str, ParameterMatch], dict[str, str], Mismatch]:
    """Pairs the model's tensors with the checkpoint's, by name and shape; ``aliases`` are further names of tied ones.

    Returns:
        Matches by the model's parameter name; the checkpoint's name of each buffer; the differences.
    """
    difference = Mismatch()
    other_names: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        other_names.setdefault(name, []).append(alias)
    matches: dict[str, ParameterMatch] = {}
    used: set[str] = set()
    for name, shape in shapes.items():
        found = _resolve(source, [name, *other_names.get(name, ())])
        if found is None:
            difference.missing.append(name)
            if name in source.left_out:
                difference.left_out.add(name)
            continue
        used.add(found)
        saved = source.parameters[found]
        if tuple(saved.shape) != tuple(shape):
            difference.shapes[name] = (tuple(shape), tuple(saved.shape))
            continue
        matches[name] = ParameterMatch(name, saved)
    buffer_names: dict[str, str] = {}
    used_buffers: set[str] = set()
    for name, buffer in buffers.items():
        candidates = [name, *other_names.get(name, ())]
        saved_name = next((c for n in candidates if (c := source.aliases.get(n, n)) in source.buffers), None)
        if saved_name is None:
            difference.missing.append(name)
            continue
        used_buffers.add(saved_name)
        if tuple(source.buffers[saved_name].shape) != tuple(buffer.shape):
            difference.shapes[name] = (tuple(buffer.shape), tuple(source.buffers[saved_name].shape))
            continue
        buffer_names[name] = source.buffers[saved_name].name
    known = used | used_buffers | set(aliases)
    difference.unexpected += [name for name in {**source.parameters, **source.buffers} if name not in known]
    return matches, buffer_names, difference


def _resolve(source: CheckpointSource | SavedNames, candidates: Iterable[str]) -> str | None:
    for name in candidates:
        kept = source.aliases.get(name, name)
        if kept in source.parameters:
            return kept
    return None


@dataclass(frozen=True)
class FillEntry:
    """Elements ``[start, stop)`` of a flat tensor, and what fills them."""

    start: int
    stop: int
    wanted: Wanted


def fills(layout: BucketLayout, rank: int, matches: Mapping[str, ParameterMatch], kind: str | None) -> list[FillEntry]:
    """Returns what a bucket's slice takes, in its order, of ``kind`` (None: best values), without missing tiles."""
    found = []
    for fragment in layout.fragments(rank):
        tile = layout.tiles[fragment.tile]
        entry = matches.get(tile.logical)
        if entry is None:
            continue
        wanted_kind = kind or entry.weights
        if wanted_kind in entry.saved.kinds:
            wanted = wanted_of(tile, wanted_kind, entry.saved.name, fragment.tile_start, fragment.tile_stop)
            found.append(FillEntry(fragment.slice_start, fragment.slice_start + fragment.numel, wanted))
    return found


def wanted_of(tile: Tile, kind: str, name: str, start: int, stop: int) -> Wanted:
    """Elements ``[start, stop)`` of a tile, which the checkpoint has under ``name``."""
    return Wanted(kind, name, start, stop, None if tile.part is None else tile)


def state_fills(layout: BucketLayout, rank: int, matches: Mapping[str, ParameterMatch]) -> dict[str, list[FillEntry]]:
    """Returns, for each per-element optimizer state, what ``rank``'s slice of a bucket takes from a checkpoint."""
    found = (matches[tile.logical] for tile in layout.tiles if tile.logical in matches)
    states = {state for entry in found for state in entry.states()}
    return {state: fills(layout, rank, matches, optimizer_kind(state)) for state in sorted(states)}
