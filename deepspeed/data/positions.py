"""Saves and restores the position of all ranks in the data, for loaders of any library and any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

from deepspeed.data.loader import DeepSpeedDataLoader, RepeatingLoader, inner_of
from deepspeed.data.orders import indices_after, order_of, why_not_shared


class _RestOfPass(Sampler):
    """Yields the indices of ``share``; the first pass starts after ``passed`` samples of all ranks."""

    def __init__(self, share: DistributedSampler, passed: int) -> None:
        self.share = share  # the loader's own sampler
        self.passed = passed  # samples of all ranks that the present pass leaves out
        self._was_read = False

    def __iter__(self) -> Iterator[int]:
        # A loader may create several iterators at the start of a pass; the pass is over once one has been read.
        if self._was_read:
            self.passed = 0
        return self._walk()

    def _walk(self) -> Iterator[int]:
        self._was_read = True
        yield from indices_after(self.share, self.passed) if self.passed else self.share

    def __len__(self) -> int:
        return len(self.share)


def has_shared_order(loader: Any) -> bool:
    """Returns whether a stateful loader of another library has a ``DistributedSampler`` and a fixed batch size.

    Then the ranks share one order of samples. If the sampler divides it as torch's class does, the order does not
    depend on the number of ranks; :func:`why_not_at` checks this against a saved position.
    """
    return _share_in(inner_of(loader)) is not None


def _share_in(inner: Any) -> DistributedSampler | None:
    if not isinstance(inner, DataLoader) or not callable(getattr(inner, "load_state_dict", None)):
        return None
    batches = inner.batch_sampler
    # A batch sampler of the program may yield batches of other sizes.
    if not isinstance(batches, BatchSampler) or type(batches).__module__.partition(".")[0] not in (
        "torch",
        "torchdata",
    ):
        return None
    share = batches.sampler.share if isinstance(batches.sampler, _RestOfPass) else batches.sampler
    return share if isinstance(share, DistributedSampler) else None


def passed_before(loader: Any) -> int:
    """Returns the number of samples of all ranks before the batches that a loader counts in the present pass."""
    rest = _rest_of(loader)
    return 0 if rest is None else rest.passed


def is_counted_without_its_sampler(loader: Any) -> bool:
    """Returns whether a loader's state lacks that of its sampler, which was replaced for the rest of a pass."""
    rest = _rest_of(loader)
    return rest is not None and callable(getattr(rest.share, "load_state_dict", None))


def _rest_of(loader: Any) -> _RestOfPass | None:
    sampler = getattr(getattr(inner_of(loader), "batch_sampler", None), "sampler", None)
    return sampler if isinstance(sampler, _RestOfPass) else None


def shared_position(loader: Any, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the position of all ranks together, like :meth:`DeepSpeedDataLoader.position`, of torchdata's loader.

    ``loader`` is one for which :func:`has_shared_order` is true, ``state`` its ``state_dict()``.
    """
    inner = inner_of(loader)
    if "_num_yielded" in state:
        count = state["_num_yielded"]
    elif "_steps_since_snapshot" in state:  # with worker processes
        count = state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"]
    else:
        return None
    share = _share_in(inner)
    assert share is not None
    epoch, order = share.epoch + 1, order_of(share)
    if state.get("_iterator_finished"):
        return {"epoch": epoch, "samples": None, **order}
    passed, size = passed_before(inner), inner.batch_sampler.batch_size
    # The last batch of a pass may be smaller.
    samples = min(passed + count * size * share.num_replicas, max(passed, len(share) * share.num_replicas))
    return {"epoch": epoch, "samples": samples, "batch_size": size, **order}


def position_of(loader: Any) -> dict[str, Any] | None:
    """Returns the position of all ranks in a loader of any library; None if it depends on the number of ranks."""
    position = getattr(loader, "position", None)
    if callable(position):  # a loader of this package
        return position()
    return shared_position(loader, loader.state_dict()) if has_shared_order(loader) else None


def why_not_at(loader: Any, position: Mapping[str, Any]) -> str | None:
    """Returns why a loader cannot restore a :func:`position_of` any number of ranks; None if it can.

    Each rank checks a part of the order. :func:`go_to_position` may be called if the result is None on all ranks.
    """
    inner = inner_of(loader)
    if isinstance(inner, DeepSpeedDataLoader):
        share = inner.data_sampler if isinstance(inner.data_sampler, DistributedSampler) else None
    elif callable(getattr(loader, "load_position", None)):
        return None if position_of(loader) is not None else "it has no position now"
    else:
        share = _share_in(inner)
    if share is None:
        return "its order (a sampler of the program, a stream, or a loader of another library) depends on the ranks"
    return why_not_shared(share, position)


def go_to_position(loader: Any, position: Mapping[str, Any]) -> None:
    """Restores a :func:`position_of` any number of ranks, after :func:`why_not_at` returned None on all ranks."""
    load_position = getattr(loader, "load_position", None)
    if callable(load_position):
        load_position(position)
    else:
        load_shared_position(loader, position)


def has_other_batch_size(loader: Any, position: Mapping[str, Any]) -> bool:
    """Returns whether a :func:`shared_position` was saved with another batch size than the loader has."""
    size = position.get("batch_size")
    return size is not None and has_shared_order(loader) and inner_of(loader).batch_sampler.batch_size != size


def load_shared_position(loader: Any, position: Mapping[str, Any]) -> None:
    """Restores :func:`shared_position` of a run with any number of ranks and any batch size."""
    inner = inner_of(loader)
    share = _share_in(inner)
    assert share is not None
    share.set_epoch(position["epoch"] - 1)
    inner.load_state_dict({})  # makes torchdata discard its iterator and start a new pass
    start_next_pass_after(inner, position["samples"] or 0)
    if isinstance(loader, RepeatingLoader):
        loader.data_iter = iter(inner)


def start_next_pass_after(loader: Any, passed: int) -> None:
    """Makes the next pass of a loader with :func:`has_shared_order` start after ``passed`` samples of all ranks."""
    inner = inner_of(loader)
    share = _share_in(inner)
    assert share is not None
    inner.batch_sampler.sampler = _RestOfPass(share, passed) if passed else share
