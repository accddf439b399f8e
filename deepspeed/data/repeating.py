"""A loader that begins again when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

_STATE = ("state_dict", "position", "sampler_state")
_RESTORE = ("load_state_dict", "load_position", "load_sampler_state")


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
    inner = loader.loader if isinstance(loader, RepeatingLoader) else loader
    batches = getattr(inner, "batch_sampler", None)
    for sampler in (getattr(inner, "sampler", None), batches, getattr(batches, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            return sampler
    return None
