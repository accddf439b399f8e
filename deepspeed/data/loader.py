"""A data loader that gives each data-parallel rank its own share of a dataset; endless repetition; moving batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from deepspeed.logging import warn_once

_STATE = ("state_dict", "position", "sampler_state")
_RESTORE = ("load_state_dict", "load_position", "load_sampler_state")


class DeepSpeedDataLoader:
    """Batches of this rank's share, reshuffled on each pass.

    A map-style dataset is divided by a :class:`~torch.utils.data.distributed.DistributedSampler`. An iterable dataset
    has no indices to divide, so every rank reads the stream as its ``__iter__`` gives it; a dataset that does not look
    at the rank then feeds all ranks the same samples, which a warning reports.

    Args:
        dataset: A map-style dataset (``__getitem__`` and ``__len__``) or an ``IterableDataset``.
        batch_size: Samples per batch and rank.
        pin_memory: Copy batches into page-locked memory.
        local_rank: Accepted for callers of older versions; the share follows from the data-parallel rank.
        tput_timer: A timer whose ``start()`` is called at each batch.
        collate_fn: Makes a batch from a list of samples; None: torch's.
        num_local_io_workers: Worker processes; None: load in this process.
        data_sampler: Chooses the samples instead of the default, and then must divide samples over the ranks itself; a
            ``BatchSampler`` chooses the batches too.
        data_parallel_world_size: Number of shares; None: 1.
        data_parallel_rank: Which share; None: 0.
        dataloader_drop_last: Leave out the last, smaller batch. Otherwise the shares are made equal by repeating the
            first samples.
        deepspeed_dataloader_config: Further arguments of :class:`torch.utils.data.DataLoader`.
        shuffle: Whether the default sampler shuffles.
        drop_last: The same as ``dataloader_drop_last``, by torch's name.

    Attributes:
        dataset: The dataset.
        batch_size: Samples per batch and rank.
        data_sampler: The sampler in use; None for an iterable dataset.
        epoch: How many passes were started, which seeds the shuffling; :meth:`set_epoch` sets it.
        post_process_func: Called with each batch and the state of a sampler that has one; what it returns is the batch.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool = False,
        local_rank: int | None = None,
        tput_timer: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Sampler | None = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: dict[str, Any] | None = None,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.tput_timer = tput_timer
        self.epoch = 0
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None
        self._given_before = 0  # micro-batches of a sampler with a state of its own, when this pass began
        self._iterator: Iterator[Any] | None = None
        self._given: int | None = None
        self._random: torch.Tensor | None = None
        self._is_resumed = False
        self._passed = 0  # samples of this pass, over all ranks, before the first batch that is counted in _given
        drop_last = drop_last or dataloader_drop_last
        ranks, rank = data_parallel_world_size or 1, data_parallel_rank or 0
        self._share = _SamplerSettings(ranks, rank, batch_size, shuffle, drop_last)
        self._has_own_order = data_sampler is None and not is_iterable_style_dataset(dataset)
        self._options: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": num_local_io_workers or 0,
            "pin_memory": pin_memory,
            **(deepspeed_dataloader_config or {}),
        }
        if is_iterable_style_dataset(dataset):
            if data_sampler is not None:
                raise ValueError(
                    "data_sampler chooses samples by index, but an IterableDataset has none; leave data_sampler out"
                )
            if ranks > 1:
                warn_once(
                    "iterable dataset on several ranks",
                    f"the training data is an IterableDataset, which {ranks} ranks read as it is: its __iter__ must "
                    "give each rank different samples, or all ranks train on the same ones",
                )
        elif data_sampler is None:
            data_sampler = DistributedSampler(
                dataset, num_replicas=ranks, rank=rank, shuffle=shuffle, drop_last=drop_last
            )
        self.data_sampler = data_sampler
        if isinstance(data_sampler, BatchSampler):
            self.dataloader = DataLoader(dataset, batch_sampler=data_sampler, **self._options)
        else:
            self.dataloader = DataLoader(
                dataset, batch_size=batch_size, sampler=data_sampler, drop_last=drop_last, **self._options
            )

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass the one numbered ``epoch``, for example after a resume."""
        self.epoch = epoch

    def __iter__(self) -> DeepSpeedDataLoader:
        if self._is_resumed:  # the pass that was resumed continues
            self._is_resumed = False
        else:
            self._begin_pass(skip=0)
        return self

    def _begin_pass(self, skip: int, passed: int = 0) -> None:
        """Starts pass ``epoch`` behind ``passed`` samples of all ranks and ``skip`` batches of this one."""
        set_sampler_epoch = getattr(self.data_sampler, "set_epoch", None)
        if set_sampler_epoch is not None:
            set_sampler_epoch(self.epoch)
        self.epoch += 1
        self._random = torch.get_rng_state()  # torch's samplers and workers are seeded from it
        if self._has_own_state:
            if self._given is not None:  # workers may have read ahead in the pass that is left
                self.data_sampler.load_state_dict(self.sampler_state())  # type: ignore[union-attr]
            self._given_before = self.data_sampler.micro_batches  # type: ignore[union-attr]
        self._given, self._passed = skip, passed
        if (skip or passed) and self.data_sampler is not None:
            batches = self._share.batches_after(self.dataset, self.epoch - 1, passed) if passed else None
            rest = _ResumedSampler(self.dataloader.batch_sampler if batches is None else batches, skip)
            self._iterator = iter(DataLoader(self.dataset, batch_sampler=rest, **self._options))
            rest.pass_over()
            return
        self._iterator = iter(self.dataloader)
        for _ in range(skip):  # a stream has no indices to pass over
            next(self._iterator, None)

    @property
    def _has_own_state(self) -> bool:
        """Returns whether the sampler saves its position (:class:`~deepspeed.data.curriculum.DeepSpeedDataSampler`)."""
        return hasattr(self.data_sampler, "micro_batches")

    def sampler_state(self) -> dict[str, Any] | None:
        """State of a sampler that has one behind the batches given out, equal on all ranks; else None."""
        if not self._has_own_state:
            return None
        given = None if self._given is None else self._given_before + self._given
        return self.data_sampler.state_dict(given)  # type: ignore[union-attr]

    def load_sampler_state(self, state: dict[str, Any]) -> None:
        """Goes to where :meth:`sampler_state` was, also on another number of ranks; without such a sampler nothing."""
        if self._has_own_state:
            self.data_sampler.load_state_dict(state)  # type: ignore[union-attr]
            self._iterator = self._given = None

    def state_dict(self) -> dict[str, Any]:
        """Returns where the loader stands: the pass, and how many of its batches were given out."""
        if self._has_own_state:  # which all ranks share
            return {"epoch": self.epoch, "given": None, "random": None}
        own = {"passed": self._passed, "batch_size": self.batch_size} if self._has_own_order else {}
        return {"epoch": self.epoch, "given": self._given, "random": self._random, **own}

    def position(self) -> dict[str, Any] | None:
        """Returns where all ranks together stand: the pass, and how many of its samples were given out.

        Only the default sampler's order is the same for any number of ranks and any batch size; with another one, or a
        stream, the result is None. ``samples`` is None between two passes.
        """
        if not self._has_own_order:
            return None
        if self._given is None:
            return {"epoch": self.epoch, "samples": None}
        return {"epoch": self.epoch, "samples": self._passed + self._given * self.batch_size * self._share.ranks}

    def load_position(self, position: dict[str, Any]) -> None:
        """Goes to :meth:`position` of a run with any number of ranks and any batch size.

        The remaining samples of the pass come in the order in which they would have come, divided among these ranks.
        """
        self.epoch, self._iterator, self._given, self._is_resumed = position["epoch"], None, None, False
        if not self._has_own_order or position["samples"] is None:
            return
        self.epoch -= 1
        self._begin_pass(skip=0, passed=position["samples"])
        self._is_resumed = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to where :meth:`state_dict` was: the next batch is the one that would have come next.

        Batches of a map-style dataset are passed over without being loaded, those of a stream are read and dropped.
        Torch's random state is left as it was. Random numbers drawn inside worker processes are not repeated.
        """
        self.epoch, self._given, self._random = state_dict["epoch"], state_dict["given"], state_dict["random"]
        self._iterator, self._is_resumed = None, False
        if self._has_own_state:
            self._given = None
        if self._given is None or self._random is None:
            return
        passed = state_dict.get("passed", 0)
        size = state_dict.get("batch_size", self.batch_size)
        if size != self.batch_size:
            passed += self._given * size * self._share.ranks
            self.load_position({"epoch": self.epoch, "samples": passed})
            return
        present = torch.get_rng_state()
        torch.set_rng_state(self._random)
        self.epoch -= 1
        self._begin_pass(skip=self._given, passed=passed)
        torch.set_rng_state(present)
        self._is_resumed = True

    def __len__(self) -> int:
        return len(self.dataloader)

    def __next__(self) -> Any:
        if self._iterator is None:
            iter(self)
        if self.tput_timer is not None:
            self.tput_timer.start()
        assert self._iterator is not None
        self._is_resumed = False
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._given = None
            raise
        if self._given is not None:
            self._given += 1
        if self.post_process_func is not None:
            batch = self.post_process_func(batch, self.sampler_state() or {})
        return batch


@dataclass(frozen=True)
class _SamplerSettings:
    """The share of one rank in the order of a default sampler.

    Attributes:
        ranks: Data-parallel ranks.
        rank: This one.
        batch_size: Samples of a batch.
        shuffle: Whether the order is shuffled.
        drop_last: Whether samples that do not fill a batch on every rank are left out.
    """

    ranks: int
    rank: int
    batch_size: int
    shuffle: bool
    drop_last: bool

    def batches_after(self, dataset: Any, epoch: int, passed: int) -> list[list[int]]:
        """Returns the batches of a pass behind its first ``passed`` samples of all ranks."""
        share: DistributedSampler = DistributedSampler(
            dataset, num_replicas=self.ranks, rank=self.rank, shuffle=self.shuffle, drop_last=self.drop_last
        )
        share.set_epoch(epoch)
        mine = _indices_after(share, passed)
        cut = len(mine) - len(mine) % self.batch_size if self.drop_last else len(mine)
        return [mine[at : at + self.batch_size] for at in range(0, cut, self.batch_size)]


def _indices_after(share: DistributedSampler, passed: int) -> list[int]:
    """Returns the indices of a rank in the present pass of ``share``, behind the first ``passed`` of all ranks."""
    whole: DistributedSampler = DistributedSampler(
        share.dataset, num_replicas=1, rank=0, shuffle=share.shuffle, seed=share.seed
    )
    whole.set_epoch(share.epoch)
    order = list(whole)
    rest = order[passed:]
    ranks = share.num_replicas
    lacking = -len(rest) % ranks
    if lacking and share.drop_last:
        rest = rest[: len(rest) - len(rest) % ranks]
    elif lacking:
        rest += (order * ranks)[:lacking]
    return rest[share.rank :: ranks]


class _ResumedSampler(Sampler):
    """The batches of ``batches`` from number ``skip`` on."""

    def __init__(self, batches: Any, skip: int) -> None:
        self._batches = batches
        self._skip = skip
        self._length = max(len(batches) - skip, 0)
        self._iterator: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self._iterator = iter(self._batches)
        return self._walk()

    def _walk(self) -> Iterator[Any]:
        self.pass_over()
        yield from self._iterator

    def pass_over(self) -> None:
        """Leaves the first batches behind, if that has not happened yet.

        Not in ``__iter__``: a sampler may draw its seed at its first batch, and torch's loader draws its own before.
        """
        while self._skip > 0:
            self._skip -= 1
            next(self._iterator, None)

    def __len__(self) -> int:
        return self._length


class _RestOfPass(Sampler):
    """The indices of ``share``; its first pass begins behind the first ``passed`` samples of all ranks.

    Attributes:
        share: The sampler that the loader was made with.
        passed: Samples of all ranks before those that the present pass yields.
    """

    def __init__(self, share: DistributedSampler, passed: int) -> None:
        self.share = share
        self.passed = passed
        self._was_read = False

    def __iter__(self) -> Iterator[int]:
        # A loader may make several iterators to begin a pass: only one that was read from ends it.
        if self._was_read:
            self.passed = 0
        return self._walk()

    def _walk(self) -> Iterator[int]:
        self._was_read = True
        yield from _indices_after(self.share, self.passed) if self.passed else self.share

    def __len__(self) -> int:
        return len(self.share)


def _inner_of(loader: Any) -> Any:
    return loader.loader if isinstance(loader, RepeatingLoader) else loader


def divides_by_torch(loader: Any) -> bool:
    """Returns whether a stateful loader of another library has torch's ``DistributedSampler`` and batches of one size.

    Then all ranks together have the order of the dataset's permutation, which is the same for any number of ranks.
    A sampler with a state of its own (torchdata's ``StatefulDistributedSampler``) is left to its library.
    """
    inner = _inner_of(loader)
    if not isinstance(inner, DataLoader) or not callable(getattr(inner, "load_state_dict", None)):
        return False
    batches, share = inner.batch_sampler, inner.sampler
    if not isinstance(batches, BatchSampler) or type(share) is not DistributedSampler:
        return False
    return batches.sampler is share or isinstance(batches.sampler, _RestOfPass)


def passed_before(loader: Any) -> int:
    """Returns how many samples of all ranks precede the batches that a loader counts in the present pass."""
    rest = getattr(getattr(_inner_of(loader), "batch_sampler", None), "sampler", None)
    return rest.passed if isinstance(rest, _RestOfPass) else 0


def shared_position(loader: Any, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns where all ranks together stand, as :meth:`DeepSpeedDataLoader.position` does.

    Args:
        loader: One for which :func:`divides_by_torch` is true.
        state: Its ``state_dict()``. That of torchdata's ``StatefulDataLoader`` has the number of batches given out; for
            another one the result is None.
    """
    inner = _inner_of(loader)
    if "_num_yielded" in state:
        given = state["_num_yielded"]
    elif "_steps_since_snapshot" in state:  # with worker processes
        given = state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"]
    else:
        return None
    share = inner.sampler
    begun = share.epoch + 1
    if state.get("_iterator_finished"):
        return {"epoch": begun, "samples": None}
    passed, size = passed_before(inner), inner.batch_sampler.batch_size
    # The last batch of a pass may be smaller.
    samples = min(passed + given * size * share.num_replicas, max(passed, len(share) * share.num_replicas))
    return {"epoch": begun, "samples": samples, "batch_size": size}


def position_of(loader: Any) -> dict[str, Any] | None:
    """Returns where all ranks together stand in a loader of any library, if that holds for any number of ranks."""
    position = getattr(loader, "position", None)
    if callable(position):  # the engine's own
        own: dict[str, Any] | None = position()
        return own
    return shared_position(loader, loader.state_dict()) if divides_by_torch(loader) else None


def go_to_position(loader: Any, position: Mapping[str, Any]) -> bool:
    """Goes to a :func:`position_of` of any number of ranks; returns whether this loader can."""
    load_position = getattr(loader, "load_position", None)
    if callable(load_position):
        can_load = position_of(loader) is not None
        if can_load:
            load_position(position)
        return can_load
    can_load = divides_by_torch(loader)
    if can_load:
        load_shared_position(loader, position)
    return can_load


def has_other_batch_size(loader: Any, position: Mapping[str, Any]) -> bool:
    """Returns whether a :func:`shared_position` was saved with another batch size than the loader has."""
    size = position.get("batch_size")
    return size is not None and divides_by_torch(loader) and _inner_of(loader).batch_sampler.batch_size != size


def load_shared_position(loader: Any, position: Mapping[str, Any]) -> None:
    """Goes to :func:`shared_position` of a run with any number of ranks and any batch size."""
    inner = _inner_of(loader)
    inner.sampler.set_epoch(position["epoch"] - 1)
    inner.load_state_dict({})  # torchdata: begins anew, without an iterator made before
    begin_behind(inner, position["samples"] or 0)
    if isinstance(loader, RepeatingLoader):
        loader.data_iter = iter(inner)


def begin_behind(loader: Any, passed: int) -> None:
    """Lets the next pass of a loader that :func:`divides_by_torch` begin behind ``passed`` samples of all ranks."""
    inner = _inner_of(loader)
    inner.batch_sampler.sampler = _RestOfPass(inner.sampler, passed) if passed else inner.sampler


def is_map_style_dataset(dataset: Any) -> bool:
    """Returns whether samples are requested by index."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def is_iterable_style_dataset(dataset: Any) -> bool:
    """Returns whether the dataset is a stream."""
    return isinstance(dataset, IterableDataset)


def move_to_device(
    item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Moves what is movable in ``item`` to ``device``.

    Args:
        item: A tensor (anything with ``to``), or tuples, lists and mappings of such; other things pass through.
        device: Where to.
        criterion_func: Moves only that for which it returns True; None: everything with ``to``.

    Returns:
        The same structure with the moved parts. What is there already is not copied.
    """
    movable = hasattr(item, "to") if criterion_func is None else criterion_func(item)
    if movable:
        return item.to(device)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(move_to_device(part, device, criterion_func) for part in item))
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(part, device, criterion_func) for part in item)
    if isinstance(item, Mapping):
        return {name: move_to_device(part, device, criterion_func) for name, part in item.items()}
    return item


class RepeatingLoader:
    """Yields the batches of ``loader`` for ever.

    A loader whose sampler shuffles by epoch (:class:`~torch.utils.data.distributed.DistributedSampler`) is informed of
    each new pass, so that passes differ. It has the methods of a loader that save and restore a position; a checkpoint
    of an engine has that of ``engine.training_dataloader``.

    Args:
        loader: Anything that can be iterated over repeatedly.

    Raises:
        ValueError: At iteration, if ``loader`` yields nothing at all.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __getattr__(self, name: str) -> Any:
        if name in _STATE:
            return getattr(self.loader, name)
        if name in _RESTORE:
            return partial(self._restore, getattr(self.loader, name))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _restore(self, restore: Callable[[Any], Any], state: Any) -> None:
        restore(state)
        self.data_iter = iter(self.loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self._begin_next_pass()
        try:
            return next(self.data_iter)
        except StopIteration:
            raise ValueError(
                f"RepeatingLoader: the loader ({type(self.loader).__name__}) yields no batch when started again. Give "
                "it data, or a loader that can be iterated over more than once (a generator cannot)"
            ) from None

    def _begin_next_pass(self) -> None:
        sampler = epoch_sampler_of(self.loader)
        if sampler is not None:
            sampler.set_epoch(getattr(sampler, "epoch", 0) + 1)
        self.data_iter = iter(self.loader)


def epoch_sampler_of(loader: Any) -> Any:
    """Returns the sampler of a loader whose order depends on an epoch (``set_epoch``), or None.

    Args:
        loader: Of any library. The engine's own counts its passes itself and has none.
    """
    inner = _inner_of(loader)
    batches = getattr(inner, "batch_sampler", None)
    for sampler in (getattr(inner, "sampler", None), batches, getattr(batches, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            return sampler
    return None
