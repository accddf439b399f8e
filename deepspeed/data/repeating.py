"""A loader that begins again when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class RepeatingLoader:
    """Yields the batches of ``loader`` for ever.

    A loader whose sampler shuffles by epoch (:class:`~torch.utils.data.distributed.DistributedSampler`) is told of each
    new pass, so that passes differ.

    Args:
        loader: Anything that can be iterated over repeatedly.

    Raises:
        ValueError: At iteration, if ``loader`` yields nothing at all.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

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
        sampler = getattr(self.loader, "sampler", None)
        set_epoch = getattr(sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(getattr(sampler, "epoch", 0) + 1)
        self.data_iter = iter(self.loader)
