"""The content of a checkpoint in an original layout: values by kind and parameter, and the small states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch

from deepspeed.checkpoint.format import optimizer_kind
from deepspeed.checkpoint.source import TrainingState
from deepspeed.errors import CheckpointError


class ValueSource(Protocol):
    """One kind of values of one parameter."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""

    def read(self, start: int, stop: int, out: torch.Tensor) -> bool:
        """Copies elements of the flattened parameter; returns whether all were there. ``out``: 1-D, as long."""


@dataclass
class Values:
    """One kind of values of one parameter."""

    tensors: Sequence[torch.Tensor]  # flat tensors, by rank
    fragments: list[RankFragment]  # where the parameter lies in them

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Values:
        """Returns the values of a tensor of any shape that one rank has whole."""
        return cls([tensor.detach().reshape(-1)], [RankFragment(0, tensor.numel(), 0, 0)] if tensor.numel() else [])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self.tensors[0].dtype

    def read(self, start: int, stop: int, out: torch.Tensor) -> bool:
        """Copies elements ``start`` to ``stop`` to ``out`` (1-D, as long); returns whether all were there."""
        copied = 0
        for fragment in self.fragments:
            first, last = max(start, fragment.start), min(stop, fragment.start + fragment.numel)
            if first < last:
                offset = fragment.offset + first - fragment.start
                out[first - start : last - start].copy_(self.tensors[fragment.rank][offset : offset + last - first])
                copied += last - first
        return copied == stop - start


@dataclass
class CheckpointValues:
    """Holds the values that the reader of one layout has found."""

    state: TrainingState  # everything small
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the shapes of every parameter
    values: dict[str, dict[str, ValueSource]] = field(default_factory=dict)  # by kind and parameter
    frozen: set[str] = field(default_factory=set)  # parameters that had no gradient
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # persistent buffers
    aliases: dict[str, str] = field(default_factory=dict)  # further names of tied parameters

    def put(self, kind: str, name: str, values: ValueSource) -> None:
        """Records values of a parameter."""
        self.values.setdefault(kind, {})[name] = values

    def put_state(self, state: str, name: str, values: ValueSource) -> None:
        """Records a per-element optimizer state of a parameter."""
        self.put(optimizer_kind(state), name, values)


_COUNTERS = frozenset({"step", "mu_product", "mu", "eta"})
"""Optimizer states that have no dimension whatever the shape of their parameter."""


def is_element_state(state: str, value: Any, shape: tuple[int, ...] | None) -> bool:
    """Returns whether an optimizer state has a value for each element of a ``shape``, which may be unknown (None)."""
    if not isinstance(value, torch.Tensor) or (value.dim() == 0 and state in _COUNTERS):
        return False
    return tuple(value.shape) == shape


Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class RankFragment:
    """Elements ``[start, start + numel)`` of a flattened parameter, in one rank's flat tensor."""

    start: int  # first element in the parameter
    numel: int  # length
    rank: int  # whose tensor
    offset: int  # where it begins there


def stage_1_and_2(
    shapes: Shapes, lengths: Sequence[int], gaps: Sequence[int] | None, where: str
) -> dict[str, list[RankFragment]]:
    """Locates a group's parameters, end to end over all ranks, with ``gaps`` free elements after each.

    Raises:
        CheckpointError: The tensors are shorter than the parameters, or longer than padding explains.
    """
    ranks = len(lengths)
    starts = [sum(lengths[:rank]) for rank in range(ranks)]
    found: dict[str, list[RankFragment]] = {}
    position = 0
    for index, (name, shape) in enumerate(shapes.items()):
        numel = prod(shape)
        fragments = []
        for rank in range(ranks):
            first, last = max(position, starts[rank]), min(position + numel, starts[rank] + lengths[rank])
            if first < last:
                fragments.append(RankFragment(first - position, last - first, rank, first - starts[rank]))
        if sum(fragment.numel for fragment in fragments) != numel:
            raise CheckpointError(f"{where}: the flat tensors of {ranks} ranks end before {name!r}; files are missing")
        found[name] = fragments
        position += numel + (gaps[index] if gaps else 0)
    surplus = sum(lengths) - position
    if surplus > 2 * ranks + sum(gaps or ()):
        raise CheckpointError(
            f"{where}: the flat tensors have {surplus} elements more than the parameters, which is no padding; the "
            "layout is not understood"
        )
    return found


def stage_3(shapes: Shapes, lengths: Sequence[int], where: str) -> dict[str, list[RankFragment]]:
    """Locates a sub-group's parameters, of equal slices. Raises CheckpointError: they do not end with the tensors."""
    ranks = len(lengths)
    found: dict[str, list[RankFragment]] = {}
    offset = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        share = -(-numel // ranks)
        found[name] = [
            RankFragment(rank * share, min(share, numel - rank * share), rank, offset)
            for rank in range(ranks)
            if rank * share < numel
        ]
        offset += share
    if any(length != offset for length in lengths):
        raise CheckpointError(
            f"{where}: the ranks' flat tensors have {sorted(set(lengths))} elements, the parameters need {offset}; "
            "files are missing or the layout is not understood"
        )
    return found
