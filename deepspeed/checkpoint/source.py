"""The interface through which a loader reads a checkpoint, independent of its writer.

Values are addressed by parameter name and by element of the flattened parameter, or of a tile of it, so that any layout
can be filled from any other: the loader requests the intervals that its rank owns and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.format import COMPUTE
from deepspeed.zero.tiling.tiles import Tile, common_runs


@dataclass(frozen=True)
class SavedParameter:
    """A parameter of a checkpoint."""

    name: str  # qualified name
    shape: tuple[int, ...]  # full shape
    # dtype by kind (see :mod:`deepspeed.checkpoint.format`), for kinds that hold the whole parameter
    kinds: Mapping[str, torch.dtype]
    is_frozen: bool  # it had no gradient when it was saved
    compute_dtype: torch.dtype  # the compute dtype of the model that was saved
    tiles: tuple[Tile, ...] = ()  # the tiles that it is saved in

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class SavedBuffer:
    """A buffer of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Wanted(NamedTuple):
    """Elements ``[start, stop)`` of a flattened tile of the parameter ``name``, of one kind."""

    kind: str  # see :mod:`deepspeed.checkpoint.format`
    name: str  # the checkpoint's name of the parameter
    start: int  # the first element
    stop: int  # one past the last
    tile: Tile | None = None  # as the reader has it; None: the whole parameter


@dataclass
class TrainingState:
    """Everything that is not a large tensor."""

    counters: dict[str, int]  # ``global_steps``, ``global_samples``, ``skipped_steps``, ``micro_steps``
    world_size: int  # data-parallel ranks that saved
    # sizes of the mesh's axes of the ranks that saved; empty if nothing belongs to single ranks
    mesh: dict[str, int] = field(default_factory=dict)
    optimizer: str | None = None  # name of the torch optimizer's class, or None
    # hyperparameters of each group; ``params`` lists parameter names
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    # per parameter name the optimizer states that are no per-element tensors, such as ``step``
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    loss_scaler: dict[str, Any] | None = None  # state of the loss scaler, or None
    skipped_in_a_row: int = 0  # non-finite steps at the end
    lr_scheduler: dict[str, Any] | None = None  # state of the schedule, or None
    extra_state: dict[str, Any] = field(default_factory=dict)  # extra state of modules, by state-dict key
    # top level of the model-states file: the caller's keys and the engine's
    model_states: dict[str, Any] = field(default_factory=dict)
    rank_state: dict[str, Any] | None = None  # RNG and data position of this rank, or None where there is none
    withheld: list[str] = field(default_factory=list)  # paths of objects that only an unrestricted loader would restore


class CheckpointSource(ABC):
    """A checkpoint that can be read."""

    label: str  # its path, for messages
    parameters: Mapping[str, SavedParameter]  # the parameters by name; tied ones occur once
    buffers: Mapping[str, SavedBuffer]  # persistent buffers by name
    aliases: Mapping[str, str]  # further names of tied tensors
    left_out: Collection[str]  # parameters that the model had and the checkpoint has not (frozen ones, on request)

    @abstractmethod
    def check(self, wanted: Sequence[Wanted]) -> None:
        """Makes sure that ``wanted`` and all buffers can be read and are undamaged, as far as the format can detect.

        Raises:
            CheckpointError: Something is missing or altered; names the file.
        """

    @abstractmethod
    def read(self, wanted: Wanted, out: torch.Tensor) -> None:
        """Copies ``wanted`` into ``out``: 1-D, of that length, any dtype and device.

        Padding of a tile becomes zero, unless the checkpoint has the same tile; then its padding is copied.
        """

    @abstractmethod
    def covered(self, wanted: Wanted) -> list[tuple[int, int]]:
        """Returns the parts of ``wanted`` that the checkpoint has, as intervals of the same flattened tile."""

    @abstractmethod
    def read_buffer(self, name: str) -> torch.Tensor:
        """Returns the buffer ``name``."""


def read_whole(wanted: Wanted, out: torch.Tensor, read: Callable[[int, int, torch.Tensor], object]) -> None:
    """:meth:`CheckpointSource.read` by ``read(start, stop, out)``, for a source with whole parameters; ``out``: 1-D."""
    tile = wanted.tile
    if tile is None:
        read(wanted.start, wanted.stop, out)
        return
    if tile.is_padded:
        out.zero_()
    for start, whole_start, numel in common_runs(tile, wanted.start, wanted.stop, tile.whole()):
        read(whole_start, whole_start + numel, out[start - wanted.start :][:numel])


class StateDictSource(CheckpointSource):
    """Reads a full state dict in memory."""

    label = "the state dict"

    def __init__(self, state_dict: Mapping[str, Any], others: Collection[str] = ()) -> None:
        self._tensors = {
            name: value.detach()
            for name, value in state_dict.items()
            if isinstance(value, torch.Tensor) and name not in others
        }
        # A name may be a parameter's or a buffer's: only the model determines which, so it is both.
        self.parameters = {
            name: SavedParameter(name, tuple(value.shape), {COMPUTE: value.dtype}, False, value.dtype)
            for name, value in self._tensors.items()
        }
        self.buffers = {
            name: SavedBuffer(name, tuple(value.shape), value.dtype) for name, value in self._tensors.items()
        }
        self.aliases, self.left_out = {}, frozenset()

    def check(self, wanted: Sequence[Wanted]) -> None:
        """Checks nothing: what is in memory is whole."""

    def read(self, wanted: Wanted, out: torch.Tensor) -> None:
        """Copies ``wanted`` into ``out``: 1-D, of that length, any dtype and device."""
        flat = self._tensors[wanted.name].reshape(-1)
        read_whole(wanted, out, lambda start, stop, place: place.copy_(flat[start:stop]))

    def covered(self, wanted: Wanted) -> list[tuple[int, int]]:
        """Returns the parts of ``wanted`` that the checkpoint has, as intervals of the same flattened tile."""
        return [(wanted.start, wanted.stop)] if wanted.kind == COMPUTE else []

    def read_buffer(self, name: str) -> torch.Tensor:
        """Returns the buffer ``name``."""
        return self._tensors[name]
