"""Parameters that model-parallel ranks saved in slices, joined by the checkpoint's description of them.

Every model-parallel rank of the original package has files of its own, with the slices that it trained. How they fit
together is in ``universal_checkpoint_info``, which AutoTP and Megatron-like programs store: either where every element
of a slice belongs (``affine_map``), or patterns of names by kind. Nothing is guessed from shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

from deepspeed.checkpoint.upstream.content import CheckpointValues, ValueSource
from deepspeed.errors import CheckpointError

INFO = "universal_checkpoint_info"


@dataclass(frozen=True)
class StridedRun:
    """Elements of a slice that are evenly spaced in the whole."""

    rank: int  # whose slice
    shape: tuple[int, ...]  # extents
    start: int  # first element in the flattened whole
    strides: tuple[int, ...]  # steps there
    slice_start: int  # first element in the flattened slice
    slice_strides: tuple[int, ...]  # steps there

    def fits(self, numel: int, slice_numel: int) -> bool:
        """Returns whether it lies inside a whole and a slice of this many elements."""
        return _inside(self.shape, self.start, self.strides, numel) and _inside(
            self.shape, self.slice_start, self.slice_strides, slice_numel
        )


@dataclass(frozen=True)
class SlicedParam:
    """Describes which slices make up a parameter."""

    shape: tuple[int, ...]  # shape of the whole tensor
    runs: tuple[StridedRun, ...] = ()  # together all of it, each element once; empty: every rank has all of it
    is_mean: bool = False  # the whole is the mean of what the ranks have


@dataclass
class _LatestCache:
    """Caches the parameter that was joined last, since consecutive reads request the same one."""

    held: tuple[object, torch.Tensor] = (None, torch.empty(0))


class JoinedValues:
    """One kind of values of one parameter, in slices."""

    def __init__(
        self, slices: Sequence[ValueSource], shapes: Sequence[Sequence[int]], whole: SlicedParam, latest: _LatestCache
    ):
        self._slices = slices
        self._numels = [prod(shape) for shape in shapes]
        self._whole = whole
        self._latest = latest

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self._slices[0].dtype

    def read(self, start: int, stop: int, out: torch.Tensor) -> bool:
        """Copies elements ``start`` to ``stop`` of the flattened whole to ``out`` (1-D); returns whether all exist."""
        whose, values = self._latest.held
        if whose is not self:
            made = self._join()
            if made is None:
                return False
            values = made
            self._latest.held = self, made
        out.copy_(values[start:stop])
        return True

    def slices_are_equal(self) -> bool:
        """Returns whether all ranks have the same."""
        first = self._slice(0)
        return all(_same(first, self._slice(rank)) for rank in range(1, len(self._slices)))

    def _slice(self, rank: int) -> torch.Tensor | None:
        flat = torch.empty(self._numels[rank], dtype=self.dtype)
        return flat if self._slices[rank].read(0, flat.numel(), flat) else None

    def _join(self) -> torch.Tensor | None:
        if self._whole.is_mean:
            found = [self._slice(rank) for rank in range(len(self._slices))]
            present = [values for values in found if values is not None]
            return torch.stack(present).mean(0) if len(present) == len(found) else None
        if not self._whole.runs:
            return self._slice(0)
        out = torch.empty(prod(self._whole.shape), dtype=self.dtype)
        for rank in sorted({run.rank for run in self._whole.runs}):
            values = self._slice(rank)
            if values is None:
                return None
            for run in (run for run in self._whole.runs if run.rank == rank):
                target = torch.as_strided(out, run.shape, run.strides, run.start)
                target.copy_(torch.as_strided(values, run.shape, run.slice_strides, run.slice_start))
        return out


def join_slices(contents: Sequence[CheckpointValues], info: Mapping[str, Any] | None, where: str) -> CheckpointValues:
    """Returns all model-parallel ranks' content as one's. Raises CheckpointError: ``info`` is missing or unfit."""
    if len(contents) == 1:
        return contents[0]
    if not info:
        raise CheckpointError(
            f"{where}: the checkpoint was saved by {len(contents)} model-parallel ranks, but does not describe how "
            f"their slices fit together (there is no {INFO}); such checkpoints cannot be read. Convert it with the "
            "program that wrote it, or export the whole model there"
        )
    first = contents[0]
    for content in contents[1:]:
        if content.shapes.keys() != first.shapes.keys():
            other = next(iter(content.shapes.keys() ^ first.shapes.keys()))
            raise CheckpointError(
                f"{where}: only some of the model-parallel ranks have the parameter {other!r}; copy the files of all "
                "ranks of one save"
            )
    joined = CheckpointValues(first.state, {}, {}, first.frozen, first.buffers, first.aliases)
    latest = _LatestCache()
    for name in first.shapes:
        shapes = [content.shapes[name] for content in contents]
        whole = whole_of(name, shapes, info, where)
        joined.shapes[name] = whole.shape
        for kind in [kind for kind, held in first.values.items() if name in held]:
            values = JoinedValues([content.values[kind][name] for content in contents], shapes, whole, latest)
            if not whole.runs and not whole.is_mean and not values.slices_are_equal():
                raise CheckpointError(
                    f"{where}: the model-parallel ranks should have the same {kind} of {name!r}, but they differ; "
                    "export the model with the program that wrote it"
                )
            joined.put(kind, name, values)
    return joined


def whole_of(name: str, shapes: Sequence[Sequence[int]], info: Mapping[str, Any], where: str) -> SlicedParam:
    """Returns how slices of a parameter fit together. Raises CheckpointError: ``info`` does not fit the shapes."""
    whole = _by_map(name, shapes, info.get("affine_map")) or _by_patterns(name, shapes, info, where)
    fits = all(run.fits(prod(whole.shape), prod(shapes[run.rank])) for run in whole.runs)
    if whole.runs and (not fits or sum(prod(run.shape) for run in whole.runs) != prod(whole.shape)):
        raise CheckpointError(
            f"{where}: the slices {[tuple(shape) for shape in shapes]} of {name!r} do not make up {whole.shape} as "
            f"{INFO} states; the files are damaged, or of a version that this release cannot read"
        )
    return whole


def _by_map(name: str, shapes: Sequence[Sequence[int]], described: Mapping[str, Any] | None) -> SlicedParam | None:
    """Cuts by the stored offsets of all elements, which newer versions write."""
    params = (described or {}).get("params") or {}
    entry = next((value for key, value in params.items() if _compiled(key).match(name)), None)
    if entry is None:
        return None
    runs = []
    for rank in range(len(shapes)):
        held = entry["ranks"][rank] if rank in entry["ranks"] else entry["ranks"][str(rank)]
        if tuple(held["shard_shape"]) != tuple(shapes[rank]):
            return None
        for run in held["pieces"]:
            if min(run["locations"]) == rank:  # others hold copies
                (start, strides), (slice_start, slice_strides) = run["source"], run["dest"]
                extents = tuple(int(extent) for extent in run["shape"])
                runs.append(StridedRun(rank, extents, start, tuple(strides), slice_start, tuple(slice_strides)))
    shape = tuple(int(extent) for extent in entry["logical_shape"])
    if {run.rank for run in runs} == {0} and all(tuple(each) == shape for each in shapes):
        return SlicedParam(shape)
    return SlicedParam(shape, tuple(runs))


def _by_patterns(name: str, shapes: Sequence[Sequence[int]], info: Mapping[str, Any], where: str) -> SlicedParam:
    """Cuts by the kind of the parameter, found by patterns of its name."""
    first = tuple(int(extent) for extent in shapes[0])
    if _named(name, info.get("autotp_unsupported_parameter_patterns") or ()):
        raise CheckpointError(
            f"{where}: the program that wrote the checkpoint marks the slices of {name!r} as not joinable; export the "
            "model in that program"
        )
    if _named(name, info.get("tp_replicated_parameter_patterns") or ()):
        return SlicedParam(first)
    if _named(name, info.get("parameter_to_average_patterns") or ()):
        return SlicedParam(first, is_mean=True)
    if not first:  # a single element, which no rank can have a part of
        return SlicedParam(first)
    if _named(name, info.get("parameter_with_2_sub_params_cat_dim_0") or ()):
        halves = [[int(shape[0]) // 2] * 2 for shape in shapes]
        return _packed(shapes, 0, halves)
    for described in info.get("parameter_with_sub_params") or ():
        fields = described if isinstance(described, Mapping) else vars(described)
        if _named(name, fields["patterns"]):
            return _sub_parameters(first, len(shapes), fields["shape"], int(fields["partition_dim"]))
    dim = 1 if _named(name, info.get("parameter_with_row_parallelism_patterns") or ()) else 0
    whole = _packed(shapes, dim, [[int(shape[dim])] for shape in shapes])
    rows = info.get("original_vocab_size")
    if dim == 0 and rows and _named(name, info.get("vocabulary_parameter_patterns") or ()):
        return _first_rows(whole, int(rows))
    return whole


def _packed(shapes: Sequence[Sequence[int]], dim: int, widths: Sequence[Sequence[int]]) -> SlicedParam:
    """Returns the slices of one or several tensors that are packed along ``dim``; ``widths`` by rank and tensor."""
    total = sum(sum(of_rank) for of_rank in widths)
    shape = tuple(total if axis == dim else int(extent) for axis, extent in enumerate(shapes[0]))
    strides = _strides(shape)
    runs, low = [], 0
    for tensor in range(len(widths[0])):
        for rank, of_rank in enumerate(widths):
            own = _strides(shapes[rank])
            extents = (*shape[:dim], of_rank[tensor], *shape[dim + 1 :])
            before = sum(of_rank[:tensor])
            runs.append(StridedRun(rank, extents, low * strides[dim], strides, before * own[dim], own))
            low += of_rank[tensor]
    return SlicedParam(shape, tuple(runs))


def _sub_parameters(first: tuple[int, ...], size: int, view: Sequence[Any], dim: int) -> SlicedParam:
    """Returns the slices of a tensor that, looked at as ``view``, packs several along ``dim``, each cut evenly."""
    packed = [int(each) for each in view[dim]] if isinstance(view[dim], (tuple, list)) else [int(view[dim])]
    whole = [sum(each) if isinstance(each, (tuple, list)) else int(each) for each in view]
    if -1 in whole:
        whole[whole.index(-1)] = prod(first) * size // -prod(whole)
    own = [extent // size if axis == dim else extent for axis, extent in enumerate(whole)]
    made = _packed([own] * size, dim, [[each // size for each in packed]] * size)
    outer = prod(whole[:dim])
    axis = max(axis for axis in range(len(first)) if prod(first[:axis]) <= outer)
    return SlicedParam(tuple(n * size if at == axis else n for at, n in enumerate(first)), made.runs)


def _first_rows(whole: SlicedParam, rows: int) -> SlicedParam:
    """Removes the rows by which a vocabulary was rounded up."""
    runs = []
    for run in whole.runs:
        low = run.start // run.strides[0]
        kept = min(run.shape[0], rows - low)
        if kept > 0:
            shape = (kept, *run.shape[1:])
            runs.append(StridedRun(run.rank, shape, run.start, run.strides, run.slice_start, run.slice_strides))
    return SlicedParam((min(rows, whole.shape[0]), *whole.shape[1:]), tuple(runs))


def _named(name: str, patterns: Iterable[str]) -> bool:
    return any(_compiled(pattern).match(name) for pattern in patterns)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(int(extent) for extent in shape[axis + 1 :]) for axis in range(len(shape)))


def _inside(shape: Sequence[int], start: int, strides: Sequence[int], numel: int) -> bool:
    if len(shape) != len(strides) or start < 0 or any(each < 0 for each in (*shape, *strides)):
        return False
    return 0 in shape or start + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) < numel


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
