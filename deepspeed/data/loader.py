"""Loads each data-parallel rank's share of a dataset, repeats loaders endlessly, and moves batches to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from deepspeed.data.orders import indices_after, order_of
from deepspeed.data.seeding import seeded
from deepspeed.logging import warn_once
from deepspeed.nested import map_tensors

_STATE = ("state_dict", "position", "sampler_state")
_RESTORE = ("load_state_dict", "load_position", "load_sampler_state")


class DeepSpeedDataLoader:
    """Yields batches of this rank's share of a dataset, reshuffled on each pass.

    A :class:`~torch.utils.data.distributed.DistributedSampler` divides a map-style dataset. An iterable dataset has no
    indices to divide, so every rank reads the whole stream, and a warning is logged: a dataset that ignores the rank
    gives all ranks the same samples.

    Args:
        dataset: A map-style dataset (``__getitem__`` and ``__len__``) or an ``IterableDataset``.
        local_rank: Has no effect: the data-parallel rank determines the share.
        tput_timer: A timer whose ``start()`` is called before each batch.
        num_local_io_workers: Worker processes; None: load in this process.
        data_sampler: Replaces the default sampler, and must divide samples over the ranks itself; a ``BatchSampler``
            replaces ``batch_size`` too.
        data_parallel_world_size: Number of shares; None: 1.
        data_parallel_rank: Number of this share; None: 0.
        dataloader_drop_last: Drop the last, smaller batch. Otherwise the first samples are repeated until all shares
            are equal.
        deepspeed_dataloader_config: Further arguments of :class:`torch.utils.data.DataLoader`.
        drop_last: The same as ``dataloader_drop_last``, by torch's name.
        seed: Random numbers of samplers, workers, and datasets that load in this process depend on it, the rank, the
            pass and the batch alone, and the program's own are not drawn. None: they are the program's.

    Raises:
        ValueError: ``data_sampler`` is given together with an iterable dataset.
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
        seed: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size  # samples per batch and rank
        self.tput_timer = tput_timer
        self.epoch = 0  # number of passes started; the shuffling of the next pass depends on it
        # called with each batch and :meth:`sampler_state` or ``{}``; returns the batch to yield
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None
        self._returned_before = 0  # micro-batches of a stateful sampler in earlier passes
        self._iterator: Iterator[Any] | None = None
        self._returned: int | None = None  # batches in this pass; None between passes
        self._random: torch.Tensor | None = None
        self._is_resumed = False
        self._passed = 0  # samples of this pass, over all ranks, before the batches in _returned
        drop_last = drop_last or dataloader_drop_last
        self._drop_last = drop_last
        ranks, rank = data_parallel_world_size or 1, data_parallel_rank or 0
        self.seed, self._rank = seed, rank
        self._options: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": num_local_io_workers or 0,
            "pin_memory": pin_memory,
            **(deepspeed_dataloader_config or {}),
        }
        if is_iterable_style_dataset(dataset):
            if data_sampler is not None:
                raise ValueError(
                    "data_sampler: expected a map-style dataset, as samplers need indices, found an IterableDataset; "
                    "leave data_sampler out"
                )
            if ranks > 1:
                warn_once(
                    "iterable dataset on several ranks",
                    f"the training data is an IterableDataset, which all {ranks} ranks read whole: its __iter__ must "
                    "give each rank different samples, or all ranks train on the same ones",
                )
        elif data_sampler is None:
            data_sampler = DistributedSampler(
                dataset, num_replicas=ranks, rank=rank, shuffle=shuffle, drop_last=drop_last
            )
        self.data_sampler = data_sampler  # the sampler in use; None for an iterable dataset
        if isinstance(data_sampler, BatchSampler):
            self.dataloader = DataLoader(dataset, batch_sampler=data_sampler, **self._options)
        else:
            self.dataloader = DataLoader(
                dataset, batch_size=batch_size, sampler=data_sampler, drop_last=drop_last, **self._options
            )

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next pass, for example after a resume."""
        self.epoch = epoch

    def __iter__(self) -> DeepSpeedDataLoader:
        if self._is_resumed:  # continue the resumed pass
            self._is_resumed = False
        else:
            self._begin_pass(skip=0)
        return self

    def _begin_pass(self, skip: int, passed: int = 0) -> None:
        """Starts pass ``epoch`` after ``passed`` samples of all ranks and then ``skip`` batches of this rank."""
        set_sampler_epoch = getattr(self.data_sampler, "set_epoch", None)
        if set_sampler_epoch is not None:
            set_sampler_epoch(self.epoch)
        self.epoch += 1
        self._random = torch.get_rng_state()  # seeds torch's samplers and workers
        if self._has_own_state:
            if self._returned is not None:  # workers may have read ahead in the abandoned pass
                self.data_sampler.load_state_dict(self.sampler_state())  # type: ignore[union-attr]
            self._returned_before = self.data_sampler.micro_batches  # type: ignore[union-attr]
        self._returned, self._passed = skip, passed
        if (skip or passed) and self.data_sampler is not None:
            batches = self._batches_after(passed) if passed else None
            rest = _ResumedSampler(self.dataloader.batch_sampler if batches is None else batches, skip)
            with self._seeded(0):
                self._iterator = iter(DataLoader(self.dataset, batch_sampler=rest, **self._options))
            with self._seeded(1):  # a sampler draws at the first batch
                rest.skip_first()
            return
        with self._seeded(0):
            self._iterator = iter(self.dataloader)
        for batch in range(skip):  # a stream must be read, as it has no indices to skip
            with self._seeded(1 + batch):
                next(self._iterator, None)

    def _seeded(self, number: int) -> AbstractContextManager[None]:
        """Returns a context with this loader's random numbers of the pass (0) or of one of its batches (from 1)."""
        return nullcontext() if self.seed is None else seeded(self.seed, self._rank, self.epoch, number)

    def _batches_after(self, passed: int) -> list[list[int]]:
        sampler, size = self._shared_sampler, self.batch_size
        assert sampler is not None
        own = indices_after(sampler, passed)
        end = len(own) - len(own) % size if self._drop_last else len(own)
        return [own[start : start + size] for start in range(0, end, size)]

    @property
    def _shared_sampler(self) -> DistributedSampler | None:
        """The sampler, if its ranks share one order of samples."""
        return self.data_sampler if isinstance(self.data_sampler, DistributedSampler) else None

    @property
    def _has_own_state(self) -> bool:
        """Whether the sampler saves its position (:class:`~deepspeed.data.curriculum.DeepSpeedDataSampler`)."""
        return hasattr(self.data_sampler, "micro_batches")

    def sampler_state(self) -> dict[str, Any] | None:
        """Returns the state of a stateful sampler after the batches returned so far, equal on all ranks; else None."""
        if not self._has_own_state:
            return None
        returned = None if self._returned is None else self._returned_before + self._returned
        return self.data_sampler.state_dict(returned)  # type: ignore[union-attr]

    def load_sampler_state(self, state: dict[str, Any]) -> None:
        """Restores :meth:`sampler_state`, on any number of ranks; does nothing without a stateful sampler."""
        if self._has_own_state:
            self.data_sampler.load_state_dict(state)  # type: ignore[union-attr]
            self._iterator = self._returned = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the loader: the pass, and the number of its batches returned so far."""
        if self._has_own_state:  # its state, which all ranks share, is saved separately
            return {"epoch": self.epoch, "given": None, "random": None}
        shared = {"passed": self._passed, "batch_size": self.batch_size} if self._shared_sampler is not None else {}
        return {"epoch": self.epoch, "given": self._returned, "random": self._random, **shared}

    def position(self) -> dict[str, Any] | None:
        """Returns the position of all ranks together: the pass, and the number of its samples returned so far.

        The result is None with a stream or a sampler other than ``DistributedSampler``, the default, whose order is the
        same for any number of ranks and any batch size. ``samples`` is None between two passes; ``order`` is that of
        :func:`~deepspeed.data.orders.order_of`.
        """
        sampler = self._shared_sampler
        if sampler is None:
            return None
        samples = None
        if self._returned is not None:
            samples = self._passed + self._returned * self.batch_size * sampler.num_replicas
        return {"epoch": self.epoch, "samples": samples, **order_of(sampler)}

    def load_position(self, position: dict[str, Any]) -> None:
        """Restores :meth:`position` of a run with any number of ranks and any batch size.

        The remaining samples of the pass keep their order, and are divided among the present ranks.
        """
        self.epoch, self._iterator, self._returned, self._is_resumed = position["epoch"], None, None, False
        if self._shared_sampler is None or position["samples"] is None:
            return
        self.epoch -= 1
        self._begin_pass(skip=0, passed=position["samples"])
        self._is_resumed = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the position of :meth:`state_dict`, so that the next batch is the one that was next.

        Earlier batches of a map-style dataset are skipped without loading them, those of a stream are read and dropped.
        Torch's random state does not change. Random numbers that worker processes draw are not repeated.
        """
        self.epoch, self._returned, self._random = state_dict["epoch"], state_dict["given"], state_dict["random"]
        self._iterator, self._is_resumed = None, False
        if self._has_own_state:
            self._returned = None
        if self._returned is None or self._random is None:
            return
        passed = state_dict.get("passed", 0)
        size = state_dict.get("batch_size", self.batch_size)
        if size != self.batch_size and self._shared_sampler is not None:
            passed += self._returned * size * self._shared_sampler.num_replicas
            self.load_position({"epoch": self.epoch, "samples": passed})
            return
        present = torch.get_rng_state()
        torch.set_rng_state(self._random)
        self.epoch -= 1
        self._begin_pass(skip=self._returned, passed=passed)
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
            with self._seeded(1 + (self._returned or 0)):
                batch = next(self._iterator)
        except StopIteration:
            self._returned = None
            raise
        if self._returned is not None:
            self._returned += 1
        if self.post_process_func is not None:
            batch = self.post_process_func(batch, self.sampler_state() or {})
        return batch


class _ResumedSampler(Sampler):
    """Yields the batches of ``batches`` after the first ``skip``."""

    def __init__(self, batches: Any, skip: int) -> None:
        self._batches = batches
        self._skip = skip
        self._length = max(len(batches) - skip, 0)
        self._iterator: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self._iterator = iter(self._batches)
        return self._walk()

    def _walk(self) -> Iterator[Any]:
        self.skip_first()
        yield from self._iterator

    def skip_first(self) -> None:
        """Skips the first batches, once.

        Not in ``__iter__``, as torch's loader draws its seed first, and a sampler may draw its own at the first batch.
        """
        while self._skip > 0:
            self._skip -= 1
            next(self._iterator, None)

    def __len__(self) -> int:
        return self._length


def is_map_style_dataset(dataset: Any) -> bool:
    """Returns whether the dataset has samples by index, and a length."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def is_iterable_style_dataset(dataset: Any) -> bool:
    """Returns whether the dataset is a stream, an ``IterableDataset``."""
    return isinstance(dataset, IterableDataset)


def move_to_device(
    item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Returns ``item`` with its tensors on ``device``, in tuples, lists and mappings too, without needless copies.

    Objects with ``to`` are moved, or those for which ``criterion_func`` is true.
    """
    is_moved = criterion_func or (lambda part: hasattr(part, "to"))
    return map_tensors(item, lambda part: part.to(device), is_moved)


class RepeatingLoader:
    """Yields the batches of ``loader`` endlessly.

    At each new pass it sets the epoch of a sampler that shuffles by epoch, such as
    :class:`~torch.utils.data.distributed.DistributedSampler`, so that passes differ. It has the loader's methods that
    save and restore a position.

    Raises:
        ValueError: A new pass of ``loader`` yields no batch; raised by ``next()``.
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
            sampler = epoch_sampler_of(self.loader)
            if sampler is not None:
                sampler.set_epoch(getattr(sampler, "epoch", 0) + 1)
            self.data_iter = iter(self.loader)
        try:
            return next(self.data_iter)
        except StopIteration:
            raise ValueError(
                f"RepeatingLoader: the loader ({type(self.loader).__name__}) yields no batch when started again. Give "
                "it data, or a loader that can be iterated over more than once (a generator cannot)"
            ) from None


def inner_of(loader: Any) -> Any:
    """Returns the loader inside a :class:`RepeatingLoader`; any other loader itself."""
    return loader.loader if isinstance(loader, RepeatingLoader) else loader


def epoch_sampler_of(loader: Any) -> Any:
    """Returns the loader's sampler that has ``set_epoch``, or None; None for loaders that count passes themselves."""
    inner = inner_of(loader)
    batches = getattr(inner, "batch_sampler", None)
    for sampler in (getattr(inner, "sampler", None), batches, getattr(batches, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            return sampler
    return None
