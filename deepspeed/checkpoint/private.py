"""Private states of ranks in a checkpoint: optional, each in a file of its own.

Error feedback (``comm.codecs.codec``) belongs to one rank and its buckets' layout. A run with the same layout continues
with it, bit for bit; any other run starts with zeros, like a new run. So it never prevents loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from deepspeed.checkpoint import names
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.source import CheckpointSource, TrainingState
from deepspeed.zero.access.gathered import checksum
from deepspeed.zero.update.driver import PrivateState

if TYPE_CHECKING:
    from deepspeed.checkpoint.run_state import RunState


def private_tensors(run_state: RunState) -> list[tuple[str, torch.Tensor]]:
    """Returns the private state of this rank, by names that state which places it belongs to; views of live tensors."""
    return [(_name(state), state.tensor) for state in _states(run_state)]


def _states(run_state: RunState) -> Sequence[PrivateState]:
    return [] if run_state.updater is None else run_state.updater.driver.private_states()


def _name(state: PrivateState) -> str:
    kind, layout = state.kind, state.layout
    if layout is None:
        return kind
    places = [(tile.logical, tile.shape, start) for tile, start in zip(layout.tiles, layout.starts, strict=True)]
    return f"{kind}:{layout.tiles[0].logical}:{checksum([*places, layout.numel, layout.num_slices]):08x}"


class PrivateFiller:
    """Restores the private state of one rank, or drops what it has."""

    def __init__(
        self, run_state: RunState, source: CheckpointSource, state: TrainingState, rank: int, *, wanted: bool
    ) -> None:
        self._targets = private_tensors(run_state)
        self._found: dict[str, torch.Tensor] | None = None
        self.notes: list[str] = []
        if not self._targets:
            return
        why = "only weights are loaded"
        if wanted:
            why = "the checkpoint was saved with another layout of ranks, or does not have it"
            if isinstance(source, CheckpointReader) and state.mesh == run_state.mesh:
                self._found = self._read(source, rank)
        if self._found is None:
            what = dict.fromkeys(state.what for state in _states(run_state))
            self.notes.append(f"{' and '.join(what)} starts from zero: {why}")

    def _read(self, reader: CheckpointReader, rank: int) -> dict[str, torch.Tensor] | None:
        """Returns the private tensors, verified; None if one is missing or has another size."""
        present = reader.named_tensors(names.private_file(rank))
        if any(name not in present or present[name] != target.shape for name, target in self._targets):
            return None
        return {name: reader.read_named(names.private_file(rank), name) for name, _ in self._targets}

    @torch.no_grad()
    def fill(self) -> None:
        """Copies the tensors that were found; others become 0."""
        for name, target in self._targets:
            if self._found is None:
                target.zero_()
            else:
                target.copy_(self._found[name])
