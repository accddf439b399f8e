"""Cuts the batches of a data loader along the sequence, Accelerate's ``skip_first_batches`` included."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch

from deepspeed.comm.job.mesh import SEQUENCE
from deepspeed.comm.transports.along import transport_along
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.logging import log_dist_once
from deepspeed.parallel.sequence.batches import BatchDescription, check, describe_batch, exchange_batches

_CLASS = "UlyssesSPDataLoaderAdapter"
_MODULE, _NAME = "accelerate.data_loader", "skip_first_batches"


class UlyssesSPDataLoaderAdapter:
    """Gives the ranks that share sequences their parts of every rank's batches, one after another.

    Every rank's loader must bring samples of its own. From one batch of each of the n ranks come n batches, which all
    ranks of the group get in turn, each its tokens of them: ``len`` is n times that of the loader. A length that n does
    not divide is padded, with labels that do not count. ``labels`` become ``shift_labels``: the next token's, found
    before cutting; ``position_ids`` are added where there are none. Where one loader ends, all end.

    Attributes that it has not are the loader's.

    Args:
        dl: The loader of this rank; its batches are dicts with ``input_ids`` and further ``[batch, tokens]`` tensors.
        sp_rank: This rank's place among those that share a sequence.
        sp_group: Their torch process group.
        sp_world_size: Their number.
        device: Where the group's transfers read and write; batches come on the host.

    Raises:
        DeepSpeedConfigError: (while iterating, on all ranks of the group) A batch cannot be cut.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = torch.device(device)
        self._batches: Iterator[Any] | None = None
        self._waiting: deque[dict[str, Any]] = deque()
        self._compared = False
        self._left_out = 0  # of the batches that come next
        _teach_accelerate(UlyssesSPDataLoaderAdapter)

    def __len__(self) -> int:
        assert isinstance(self.dl, Sized)
        return len(self.dl) * self.sp_world_size - self._left_out

    def skipping(self, batches: int, skip: Callable[[Any, int], Any]) -> UlyssesSPDataLoaderAdapter:
        """Returns a loader of what follows the first ``batches`` of this one, counted as its own are.

        Args:
            batches: How many.
            skip: Of a loader and a number, that loader without its first batches: Accelerate's.
        """
        whole, rest = divmod(batches, self.sp_world_size)
        made = UlyssesSPDataLoaderAdapter(
            skip(self.dl, whole), self.sp_rank, self.sp_group, self.sp_world_size, self.device
        )
        made._left_out = rest
        return made

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        return self

    def __next__(self) -> dict[str, Any]:
        """Returns the next batch, this rank's tokens. Every rank of the group must call it."""
        while True:
            if not self._waiting:
                self._refill()
            batch = self._waiting.popleft()
            if not self._left_out:
                return batch
            self._left_out -= 1

    def _refill(self) -> None:
        if self._batches is None:
            self._batches = iter(self.dl)
        batch = next(self._batches, None)
        mine, tensors = (
            (BatchDescription(ended=True), {}) if batch is None else describe_batch(batch, self.sp_world_size)
        )
        transport = transport_along(self.sp_group, self.device, SEQUENCE)
        descriptions = gather_objects(transport, mine, label=f"the shapes of the next batches ({_CLASS})")
        if any(one.ended for one in descriptions):
            self._batches = None
            left = [str(rank) for rank, one in enumerate(descriptions) if not one.ended]
            if left:
                log_dist_once(
                    f"{_CLASS}: the loaders of the ranks {', '.join(left)} (of those that share a sequence) have more "
                    "batches than the others'; they are left out, so that all ranks end together"
                )
            raise StopIteration
        check(descriptions, _CLASS)
        self._warn(descriptions)
        self._waiting.extend(exchange_batches(tensors, descriptions, self.sp_group, self.device))

    def _warn(self, descriptions: list[BatchDescription]) -> None:
        padded = next((one for one in descriptions if one.padded), None)
        if padded is not None:
            log_dist_once(
                f"{_CLASS}: sequences whose length {self.sp_world_size} does not divide are padded at the end, with "
                f"labels that do not count (the first by {padded.padded} token(s))"
            )
        if not self._compared and self.sp_world_size > 1 and len({one.digest for one in descriptions}) == 1:
            log_dist_once(
                f"{_CLASS}: all {self.sp_world_size} ranks that share sequences brought the same samples, so each is "
                f"trained on {self.sp_world_size} times; give every rank's loader samples of its own (a "
                "DistributedSampler over all ranks)",
                level=30,
            )
        self._compared = True


def _teach_accelerate(cls: type) -> None:
    """Lets Accelerate skip batches of ``cls`` by its method ``skipping(batches, skip)``; does nothing the second time.

    Accelerate makes a new loader from the parts of the given one, which then cuts nothing: a Trainer that resumes in
    the middle of an epoch would give its model whole batches. So the function is replaced wherever it was imported.
    """
    plain = getattr(sys.modules.get(_MODULE), _NAME, None)
    if plain is None or hasattr(plain, "_asks"):
        return

    @functools.wraps(plain)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, cls):
            return dataloader.skipping(num_batches, plain)  # type: ignore[attr-defined]
        return plain(dataloader, num_batches)

    skip_first_batches._asks = cls  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is plain:
            setattr(module, _NAME, skip_first_batches)
