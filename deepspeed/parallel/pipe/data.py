"""The data of a pipeline: pulls micro-batches, and lets the ranks agree that all of them have enough.

It also compares whether the ranks of one copy of a pipeline have the same samples: each sends two numbers computed from
its items.

The first stage uses the inputs and the last one the labels, and each rank loads its own. If their loaders differ in
order (another shuffle seed, a sampler that counts stages as data ranks), inputs would be trained with the labels of
other samples, without an error.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from deepspeed import nested
from deepspeed.axes import OTHER_PARTS, PIPE
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import PipelineError
from deepspeed.parallel.pipe.values import tensors_of

_PULLS_NOT, _HAS_NONE = -2, -1
_CALLS = ("train_batch", "eval_batch", "_exec_schedule")


class DataError(PipelineError):
    """Raised on all ranks alike; the engine can continue after it."""


class DataAgreement(NamedTuple):
    """Holds what the ranks have agreed on about the data of a step."""

    sends_labels: bool  # whether the first stage sends the labels, since the last one has no data
    label_numel: int  # elements of the labels of one copy of the model, in the step; of the copy with most of them


class DataFeed:
    """Items ``(inputs, labels)`` of a rank, pulled for a whole step before it begins."""

    def __init__(self) -> None:
        self.iterator: Iterator[Any] | None = None  # where items come from, or None
        # applied to every item; where there is no iterator it is given None
        self.batch_fn: Callable[[Any], Any] | None = None
        self._pulled: deque[Any] = deque()

    def use(self, source: Iterable[Any] | None) -> None:
        """Takes items from ``source`` from now on; drops unused ones of another source."""
        iterator = None if source is None else iter(source)
        if iterator is not self.iterator:
            self._pulled.clear()
        self.iterator = iterator

    @property
    def has_any(self) -> bool:
        """Returns whether there is anything to pull from."""
        return self.iterator is not None or self.batch_fn is not None

    def pull(self, count: int) -> int:
        """Pulls up to ``count`` items; returns how many there are."""
        while len(self._pulled) < count:
            try:
                item = None if self.iterator is None else next(self.iterator)
            except StopIteration:
                break
            self._pulled.append(item if self.batch_fn is None else self.batch_fn(item))
        return min(len(self._pulled), count)

    def label_numel(self, count: int) -> int:
        """Returns the elements of the labels of the items that are ready."""
        pairs = (item for item in islice(self._pulled, count) if isinstance(item, (tuple, list)) and len(item) == 2)
        return sum(tensor.numel() for _, labels in pairs for tensor in tensors_of(labels))

    def ready(self, count: int) -> list[Any]:
        """Returns the items that are ready, at most ``count``."""
        return list(islice(self._pulled, count))

    def use_up(self, count: int) -> None:
        """Drops those items, once their step has started on all ranks."""
        for _ in range(min(count, len(self._pulled))):
            self._pulled.popleft()


def agree_on_data(
    job: Transport, mesh: Mesh, rank: int, feed: DataFeed | None, count: int, call: str, *, needs_labels: bool
) -> Callable[[], DataAgreement]:
    """Pulls a step's items and begins to make sure that all ranks have theirs. Every rank of the job must call it.

    Args:
        job: All ranks, laid out as a mesh, of which ``rank`` is this one.
        feed: This rank's data; None on stages that need none.
        count: Micro-batches of the step.
        call: What the ranks are about to do: train_batch, eval_batch or _exec_schedule.
        needs_labels: Whether the last stage uses labels.

    Returns:
        Waits for the numbers of the other ranks, and returns the agreement. It raises DataError if some rank makes
        another call, has too few items, another number of micro-batches, or other samples than the rest of its copy of
        the model; the same on every rank.
    """
    ready, prints, numel = _PULLS_NOT, (0, 0), 0
    if feed is not None:
        ready = feed.pull(count) if feed.has_any else _HAS_NONE
        prints, numel = fingerprints(feed.ready(count)), feed.label_numel(count)
    mine = torch.tensor([count, ready, int(needs_labels), *prints, numel, _CALLS.index(call)], dtype=torch.int64)
    rows = job.start_small(mine, channel="call", label=f"{call}, with {count} micro-batch(es)")
    return lambda: _agreement(rows().tolist(), mesh, rank, count, call)


def _agreement(rows: list[list[int]], mesh: Mesh, rank: int, count: int, call: str) -> DataAgreement:
    """Returns the agreement of :func:`agree_on_data`; raises if the ranks' data do not match."""
    other_calls = [other for other, row in enumerate(rows) if _CALLS[row[-1]] != call]
    if other_calls:
        theirs = _CALLS[rows[other_calls[0]][-1]]
        raise DataError(
            f"{call}: rank {rank} calls it, rank {other_calls[0]} calls {theirs}. No weight has changed; make the "
            "calls depend on what is equal on all ranks, such as engine.global_steps"
        )
    others = [other for other, (number, *_) in enumerate(rows) if number != count]
    if others:
        raise DataError(
            f"{call}: expected the same number of micro-batches on all ranks of a pipeline, found {count} on rank "
            f"{rank} and {rows[others[0]][0]} on rank {others[0]}. Set gradient_accumulation_steps, "
            "set_train_batch_size or num_micro_batches alike on all of them"
        )
    last = mesh.size(PIPE) - 1
    stages = [mesh.position(other, PIPE) for other in range(len(rows))]
    for other, (_, got, *_) in enumerate(rows):
        is_missing = got == _HAS_NONE and (stages[other] == 0 or last == 0)
        if is_missing or 0 <= got < count:
            what = f"ended after {got} of {count} micro-batches, so micro-batch {got} is missing"
            raise DataError(
                f"{call}: the data of stage {stages[other]} (rank {other}) "
                + (
                    "is missing: pass an iterator there, or a function to set_batch_fn that works without data"
                    if is_missing
                    else what + ". No weight has changed; give the ranks that load data loaders of equal length, or a "
                    "RepeatingLoader"
                )
            )
    wrong = different_samples([(inputs, labels, got == count) for _, got, _, inputs, labels, *_ in rows], mesh)
    if wrong is not None:
        raise DataError(
            f"{call}: {wrong}. No weight has changed; load by engine.grid.data_parallel_id and shuffle by one seed on "
            "all ranks, as the loader of initialize(training_data=...) does, or give data to the first stage alone: "
            "labels then are sent. Where a stage does not need inputs or labels, None may stand for them"
        )
    mine_at_last = mesh.group(rank, PIPE)[-1]
    sends_labels = last > 0 and bool(rows[mine_at_last][2]) and rows[mine_at_last][1] == _HAS_NONE
    return DataAgreement(sends_labels, max(row[-2] for row in rows))


def parts_of(item: Any) -> tuple[Any, Any]:
    """Inputs and labels of an item; lists become tuples.

    Raises:
        PipelineError: The item is not a pair.
    """
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        found = f"{type(item).__name__} of {len(item)}" if isinstance(item, (tuple, list)) else type(item).__name__
        raise PipelineError(
            f"the data gave a {found}; expected pairs (inputs, labels). set_batch_fn can make them of other items"
        )
    inputs, labels = item
    return _as_tuple(inputs), _as_tuple(labels)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_LOOKED_AT = 1024  # elements read of a tensor; longer ones are sampled


def fingerprints(items: Iterable[Any]) -> tuple[int, int]:
    """Returns a fingerprint of all inputs and one of all labels; an item that is not a pair of these gives 0.

    They are equal for equal tensors in host memory and almost surely differ otherwise; 0 if nothing distinguishes
    samples: no tensor, or only zeros or ones, which programs pass as placeholders.
    """
    found = [0, 0]
    for item in items:
        if isinstance(item, (tuple, list)) and len(item) == 2:
            for which, part in enumerate(item):
                for tensor in nested.tensors_of(part):
                    if tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.numel():
                        found[which] = _crc(tensor, found[which])
    return found[0], found[1]


def _crc(tensor: torch.Tensor, before: int) -> int:
    flat = tensor.detach().reshape(-1)
    seen = flat[:: max(1, flat.numel() // _LOOKED_AT)].contiguous()
    data, one = seen.view(torch.uint8).numpy().tobytes(), seen.element_size()
    if data == data[:one] * seen.numel() and seen[0].item() in (0, 1):
        return before
    return zlib.crc32(data, before)


def different_samples(rows: Sequence[tuple[int, int, bool]], mesh: Mesh) -> str | None:
    """Returns a message about mismatched samples of a step, the same on every rank; None if they match.

    Stages may differ in inputs alone (noise in those that are not used) or in labels alone; if both differ, the samples
    do. ``rows`` has one row per rank: the numbers of its inputs and labels, and whether it has items.
    """
    last = mesh.size(PIPE) - 1
    for group in mesh.groups(*OTHER_PARTS):
        here = [rank for rank in group if rows[rank][2]]
        for which, stage, what in ((0, 0, "inputs"), (1, last, "labels")):
            using = [rank for rank in here if mesh.position(rank, PIPE) == stage and rows[rank][which]]
            other = next((rank for rank in using if rows[rank][which] != rows[using[0]][which]), None)
            if other is not None:
                return f"the ranks {using[0]} and {other} share the layers of stage {stage}, but have different {what}"
        with_both = [rank for rank in here if rows[rank][0] and rows[rank][1]]
        for rank in with_both:
            if all(rows[rank][which] != rows[with_both[0]][which] for which in (0, 1)):
                who = " and ".join(f"{one} (stage {mesh.position(one, PIPE)})" for one in (with_both[0], rank))
                return (
                    f"the ranks {who} work on one copy of the model, but have different samples, so outputs of one "
                    "sample would be compared with labels of another"
                )
    return None
