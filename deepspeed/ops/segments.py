"""Which pieces of which tensors a flat run holds.

Optimizers see 1-D runs. Most do not care where one tensor ends and the next begins; LAMB (a norm per tensor) and
Muon (a matrix at a time) do, and learn it from the :class:`SegmentTable` handed to ``attach_segments``. Pure data:
no tensors, no communication.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """A piece of one tensor inside one run.

    Elements ``[start, stop)`` of the run hold elements ``[tensor_start, tensor_start + stop - start)`` of the
    flattened tensor.

    Attributes:
        name: The tensor's name, for messages.
        index: The tensor's number, 0 to ``num_tensors - 1``, equal on all ranks.
        start: First element within the run.
        stop: One past the last element within the run.
        tensor_start: First element within the flattened tensor.
        shape: Full shape of the tensor, as the model has it.
    """

    name: str
    index: int
    start: int
    stop: int
    tensor_start: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of this piece."""
        return self.stop - self.start

    @property
    def tensor_numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def tensor_stop(self) -> int:
        """One past the last element within the flattened tensor."""
        return self.tensor_start + self.numel


@dataclass(frozen=True)
class SegmentTable:
    """All segments of this rank's runs.

    Attributes:
        by_param: ``id(run tensor)`` to its segments, in ascending order of ``start``. Gaps are padding.
        num_tensors: Number of tensors on all ranks together.
        group: The process group over which tensors are cut; None when every tensor is whole on this rank.
    """

    by_param: dict[int, tuple[Segment, ...]]
    num_tensors: int
    group: object | None = None

    def __post_init__(self) -> None:
        for segments in self.by_param.values():
            position = 0
            for segment in segments:
                problem = _problem(segment, position, self.num_tensors)
                if problem:
                    raise ValueError(f"segment {segment}: {problem}")
                position = segment.stop

    def of(self, run: object) -> tuple[Segment, ...]:
        """The segments of ``run``.

        Raises:
            KeyError: The table does not know this run.
        """
        try:
            return self.by_param[id(run)]
        except KeyError:
            raise KeyError(
                f"the segment table has no entry for a run of {getattr(run, 'numel', lambda: '?')()} elements; "
                "attach_segments must be called again after the runs have changed"
            ) from None


def _problem(segment: Segment, position: int, num_tensors: int) -> str | None:
    if segment.start < position or segment.stop < segment.start:
        return f"must start at or after element {position} and not end before it starts"
    if not 0 <= segment.index < num_tensors:
        return f"index must lie in 0..{num_tensors - 1}"
    if segment.tensor_start < 0 or segment.tensor_stop > segment.tensor_numel:
        return f"reaches beyond the {segment.tensor_numel} elements of its tensor"
    return None
