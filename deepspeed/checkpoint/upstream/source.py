"""A checkpoint of the original package as a :class:`~deepspeed.checkpoint.source.CheckpointSource`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from deepspeed.checkpoint.directory import Format
from deepspeed.checkpoint.format import COMPUTE, MASTER
from deepspeed.checkpoint.source import SavedBuffer, SavedParameter, Wanted, read_whole
from deepspeed.checkpoint.upstream.content import CheckpointValues
from deepspeed.checkpoint.upstream.files import find_layers
from deepspeed.checkpoint.upstream.partitioned import read_partitioned
from deepspeed.checkpoint.upstream.pipeline import read_pipeline
from deepspeed.checkpoint.upstream.universal import read_universal
from deepspeed.errors import CheckpointError


class UpstreamSource:
    """Reads a checkpoint in upstream's layout; a :class:`~deepspeed.checkpoint.source.CheckpointSource`.

    Attributes:
        state: Everything that is no large tensor.
    """

    def __init__(self, folder: Path, content: CheckpointValues) -> None:
        self.label = str(folder)
        self._content = content
        self.state = content.state
        self.aliases: Mapping[str, str] = content.aliases
        self.left_out: frozenset[str] = frozenset()
        self.parameters = {name: self._parameter(name) for name in content.shapes}
        self.buffers = {
            name: SavedBuffer(name, tuple(tensor.shape), tensor.dtype) for name, tensor in content.buffers.items()
        }

    def _parameter(self, name: str) -> SavedParameter:
        kinds = {kind: held[name].dtype for kind, held in self._content.values.items() if name in held}
        if MASTER not in kinds and COMPUTE not in kinds:
            raise CheckpointError(
                f"{self.label}: the values of parameter {name!r} are nowhere; the checkpoint is not complete"
            )
        compute = kinds.get(COMPUTE, torch.float32)
        return SavedParameter(name, self._content.shapes[name], kinds, name in self._content.frozen, compute)

    def check(self, wanted: Sequence[Wanted]) -> None:
        """Makes sure that the flat layout was understood: 16-bit weights are the rounded masters.

        Raises:
            CheckpointError: Saved 16-bit weights are not the rounded masters.
            CheckpointError: Saved 16-bit weights are not the rounded masters.
        """
        both = self._content.values.get(COMPUTE, {}).keys() & self._content.values.get(MASTER, {}).keys()
        for entry in wanted:
            if entry.kind == MASTER and entry.name in both:
                numel = entry.stop - entry.start
                master, compute = (
                    torch.empty(numel),
                    torch.empty(numel, dtype=self.parameters[entry.name].compute_dtype),
                )
                self.read(entry, master)
                self.read(entry._replace(kind=COMPUTE), compute)
                same = (master.to(compute.dtype) == compute) | compute.isnan()
                if not bool(same.all()):
                    raise CheckpointError(
                        f"{self.label}: the masters of {entry.name!r} do not round to the saved 16-bit weights; "
                        "the flat layout was not understood or the weights were changed apart from it; "
                        "zero_to_fp32.py of the package that wrote it may help"
                    )

    def covered(self, wanted: Wanted) -> list[tuple[int, int]]:
        """Nothing: where there is a master, the 16-bit weights are just its rounding (see :meth:`check`)."""
        return []

    def read(self, wanted: Wanted, out: torch.Tensor) -> None:
        """Copies ``wanted`` into ``out``: 1-D, of that length, any dtype and device."""
        values = self._content.values[wanted.kind][wanted.name]

        def read(start: int, stop: int, place: torch.Tensor) -> None:
            if not values.read(start, stop, place):
                raise CheckpointError(f"{self.label}: {wanted.kind} of {wanted.name!r} is not complete")

        read_whole(wanted, out, read)

    def read_buffer(self, name: str) -> torch.Tensor:
        """Returns the buffer ``name``."""
        return self._content.buffers[name].clone()


def open_upstream(
    folder: Path,
    kind: Format,
    *,
    trust: bool = False,
    trained: Sequence[Sequence[str]] = (),
    layer_names: Mapping[int, str] | None = None,
) -> UpstreamSource:
    """Opens a tag folder of the original package.

    Args:
        folder: The tag folder.
        kind: Its layout.
        trust: Unpickle objects of the caller, which may run code.
        trained: Parameter names by param group, in the optimizer's order, of a pipeline those of all stages. Needed for
            optimizer states of stage 0 alone, whose files do not name them.
        layer_names: With what the names of a pipeline's layer begin in the model, where that is not its number.

    Raises:
        CheckpointError: It is not complete, or not understood.
    """
    try:
        if kind is Format.UNIVERSAL:
            return UpstreamSource(folder, read_universal(folder, trust=trust))
        if find_layers(folder):
            read = read_pipeline(folder, trust=trust, layer_names=layer_names or {}, trained=trained)
            return UpstreamSource(folder, read)
        return UpstreamSource(folder, read_partitioned(folder, trust=trust, trained=trained))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: the layout is not understood ({type(error).__name__}: {error}); the files are damaged or of a "
            "version that this release cannot read"
        ) from error
