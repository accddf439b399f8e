"""Tables of the fragments of tensors that a flat run holds.

Optimizers update 1-D runs. Most do not need to know the tensors in a run. LAMB (a norm per tensor) and Muon (a matrix
at a time) do; ``attach_segments`` passes them a :class:`FragmentTable`. It also lists the fragments of the other ranks
(:class:`SharedTensor`), so they need not be exchanged. This module has no tensors and no communication.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.comm.job.axis import Axis


@dataclass(frozen=True)
class TensorFragment:
    """A fragment of one tensor inside one run.

    Elements ``[start, stop)`` of the run hold elements ``[tensor_start, tensor_start + stop - start)`` of the
    flattened tensor.
    """

    name: str  # the tensor's name, for messages
    index: int  # the tensor's number, 0 to ``num_tensors - 1``, equal on all ranks
    start: int  # first element within the run
    stop: int  # one past the last element within the run
    tensor_start: int  # first element within the flattened tensor
    shape: tuple[int, ...]  # full shape of the tensor, as the model has it

    @property
    def numel(self) -> int:
        """Returns the number of elements of this fragment."""
        return self.stop - self.start

    @property
    def tensor_numel(self) -> int:
        """Returns the number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def tensor_stop(self) -> int:
        """Returns one past the last element within the flattened tensor."""
        return self.tensor_start + self.numel


@dataclass(frozen=True)
class SharedTensor:
    """One tensor of a flat buffer that is cut over ranks; the same on all of them.

    Ranks are given by position: the order of their parts in the buffer.
    """

    name: str  # the tensor's name, for messages
    index: int  # the tensor's number, as in its fragments
    shape: tuple[int, ...]  # full shape of the tensor, as the model has it
    param_group: int  # index of the param group of the runs that hold it
    start: int  # first element within the buffer
    # Start of each position's part in the buffer, ascending, and the end of the last part. For equal parts a ``range``,
    # whose memory does not grow with the number of ranks.
    bounds: Sequence[int]

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    def positions(self) -> range:
        """Returns the range of positions that hold elements of the tensor."""
        if not self.numel:
            return range(0)
        first = bisect.bisect_right(self.bounds, self.start) - 1
        return range(first, bisect.bisect_left(self.bounds, self.start + self.numel, lo=first))

    def held_by(self, position: int) -> tuple[int, int]:
        """Returns ``(start, stop)`` of the flattened tensor's elements at a position; equal if it has none."""
        first, last = self.bounds[position] - self.start, self.bounds[position + 1] - self.start
        start = min(max(first, 0), self.numel)
        return start, max(start, min(last, self.numel))

    def numel_at(self, position: int) -> int:
        """Returns the number of the tensor's elements at a position."""
        start, stop = self.held_by(position)
        return stop - start


@dataclass(frozen=True)
class CutTensors:
    """The tensors of which each model-parallel rank has a part."""

    axis: Axis  # these ranks
    # Indices of the tensors in the table of fragments. The tensors come in the same order on all ranks; their indices
    # may differ between ranks.
    columns: tuple[int, ...]
    # For each tensor, whether this rank's part is added in sums over ranks. If ranks hold equal parts, only one is
    # added.
    counts: tuple[bool, ...]


@dataclass(frozen=True)
class FragmentTable:
    """All fragments of this rank's runs."""

    # ``id(run tensor)`` to its fragments, in ascending order of ``start``. Gaps are padding.
    by_param: dict[int, tuple[TensorFragment, ...]]
    num_tensors: int  # number of tensors on all ranks together
    axis: Axis | None = None  # the ranks over which tensors are cut; None when every tensor is whole on this rank
    shared: tuple[SharedTensor, ...] = ()  # every tensor that has a param group, in ascending order of ``index``
    ranks: Sequence[int] = range(1)  # the place on the axis of each position
    position: int = 0  # the position of this rank
    # The tensors that are parts of larger ones; None if there are none. Their shapes are those of the parts.
    cut: CutTensors | None = None
    job_ranks: Sequence[int] = ()  # the global rank of each position; empty if unknown

    def __post_init__(self) -> None:
        for fragments in self.by_param.values():
            position = 0
            for fragment in fragments:
                problem = _problem(fragment, position, self.num_tensors)
                if problem:
                    raise ValueError(f"fragment {fragment}: {problem}")
                position = fragment.stop

    def of(self, run: object) -> tuple[TensorFragment, ...]:
        """Returns the fragments of ``run``. Raises KeyError: the table does not contain this run."""
        try:
            return self.by_param[id(run)]
        except KeyError:
            raise KeyError(
                f"the fragment table has no entry for a run of {getattr(run, 'numel', lambda: '?')()} elements; "
                "call attach_segments again after the runs have changed"
            ) from None


def _problem(fragment: TensorFragment, position: int, num_tensors: int) -> str | None:
    if fragment.start < position or fragment.stop < fragment.start:
        return f"expected a start from element {position} on, and no end before it; correct the table"
    if not 0 <= fragment.index < num_tensors:
        return f"expected an index from 0 to {num_tensors - 1}; correct the table"
    if fragment.tensor_start < 0 or fragment.tensor_stop > fragment.tensor_numel:
        return f"expected elements within the {fragment.tensor_numel} of its tensor; correct the table"
    return None
