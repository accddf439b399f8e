"""What a reader of one of the original layouts finds: values by kind and parameter, and everything small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from deepspeed.checkpoint.format import optimizer_kind
from deepspeed.checkpoint.source import TrainingState
from deepspeed.checkpoint.upstream.walks import Extent


class ValueSource(Protocol):
    """One kind of values of one parameter."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""

    def read(self, start: int, stop: int, out: torch.Tensor) -> bool:
        """Copies elements of the flattened parameter; returns whether all were there.

        Args:
            start: First element.
            stop: One behind the last element.
            out: 1-D, as long.
        """


@dataclass
class Values:
    """One kind of values of one parameter.

    Attributes:
        tensors: Flat tensors, by rank.
        extents: Where the parameter lies in them.
    """

    tensors: Sequence[torch.Tensor]
    extents: list[Extent]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Values:
        """Returns the values of a tensor of any shape that is there in one piece."""
        return cls([tensor.detach().reshape(-1)], [Extent(0, tensor.numel(), 0, 0)] if tensor.numel() else [])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self.tensors[0].dtype

    def read(self, start: int, stop: int, out: torch.Tensor) -> bool:
        """Copies elements ``start`` to ``stop`` to ``out`` (1-D, as long); returns whether all were there."""
        copied = 0
        for extent in self.extents:
            first, last = max(start, extent.start), min(stop, extent.start + extent.numel)
            if first < last:
                offset = extent.offset + first - extent.start
                out[first - start : last - start].copy_(self.tensors[extent.rank][offset : offset + last - first])
                copied += last - first
        return copied == stop - start


@dataclass
class CheckpointValues:
    """What the readers of the several layouts find.

    Attributes:
        shapes: Of every parameter.
        values: By kind and parameter.
        frozen: Parameters that had no gradient.
        buffers: Persistent buffers.
        aliases: Further names of tied parameters.
        state: Everything small.
    """

    state: TrainingState
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    values: dict[str, dict[str, ValueSource]] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def put(self, kind: str, name: str, values: ValueSource) -> None:
        """Notes values of a parameter."""
        self.values.setdefault(kind, {})[name] = values

    def put_state(self, state: str, name: str, values: ValueSource) -> None:
        """Notes a per-element optimizer state of a parameter."""
        self.put(optimizer_kind(state), name, values)
