"""Computes which samples of a ``DistributedSampler`` are left in an epoch, for any number of ranks."""

from __future__ import annotations

import copy
import random
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from torch.utils.data.distributed import DistributedSampler

_checksums: WeakKeyDictionary[DistributedSampler, tuple[int, int | None]] = WeakKeyDictionary()


def with_ranks(sampler: DistributedSampler, ranks: int, rank: int) -> DistributedSampler:
    """Returns a copy of ``sampler`` in its present epoch, for rank ``rank`` of ``ranks``; shares the dataset."""
    copied: DistributedSampler = copy.deepcopy(sampler, {id(sampler.dataset): sampler.dataset})
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    copied.num_replicas, copied.rank = ranks, rank
    copied.num_samples = samples // ranks if copied.drop_last else -(-samples // ranks)
    copied.total_size = copied.num_samples * ranks
    if hasattr(copied, "next_yielded"):  # of torchdata's class: the start of the next pass after a state was loaded
        copied.next_yielded = None
    return copied


def indices_after(sampler: DistributedSampler, passed: int) -> list[int]:
    """Returns the indices of ``sampler``'s rank in its present epoch, after the first ``passed`` of all ranks."""
    with _keep_random_state():
        order = list(with_ranks(sampler, 1, 0))
    return _share_of(order, passed, sampler.num_replicas, sampler.rank, drop_last=sampler.drop_last)


def _share_of(order: list[int], passed: int, ranks: int, rank: int, *, drop_last: bool) -> list[int]:
    """Divides ``order[passed:]`` over ranks by the rule of torch's ``DistributedSampler``."""
    rest = order[passed:]
    missing = -len(rest) % ranks
    if missing and drop_last:
        rest = rest[: len(rest) - len(rest) % ranks]
    elif missing:
        rest += (order * ranks)[:missing]
    return rest[rank::ranks]


def order_of(sampler: DistributedSampler) -> dict[str, Any]:
    """Returns the entries of a saved position about the order of ``sampler``; empty for torch's own class.

    A subclass may order samples per rank, or differently in each run. :func:`why_not_shared` detects this from
    ``epoch``, ``ranks`` and a ``checksum`` of the order (None if the sampler cannot be copied). The checksum needs the
    whole order, and is computed once per epoch.
    """
    if type(sampler) is DistributedSampler:
        return {}
    known = _checksums.get(sampler)
    if known is None or known[0] != sampler.epoch:
        try:
            with _keep_random_state():
                known = sampler.epoch, _checksum(with_ranks(sampler, 1, 0))
        except Exception:  # raised by the program's class; why_not_shared reports it
            known = sampler.epoch, None
        _checksums[sampler] = known
    return {"order": {"epoch": sampler.epoch, "ranks": sampler.num_replicas, "checksum": known[1]}}


def why_not_shared(sampler: DistributedSampler, position: Mapping[str, Any]) -> str | None:
    """Returns why the ranks of a sampler do not divide one order as torch's class does; None if they do.

    Each rank compares a part of the indices, for the present number of ranks and for the saved one. The order is shared
    if the result is None on all ranks. The sampler is not changed.
    """
    name, order = type(sampler).__name__, position.get("order")
    if order is None:  # saved with torch's own class
        return None if type(sampler) is DistributedSampler else f"{name} is not the class of the sampler that was saved"
    before, ranks, rank = order["ranks"], sampler.num_replicas, sampler.rank
    try:
        with _keep_random_state():
            tried = with_ranks(sampler, 1, 0)
            tried.set_epoch(order["epoch"])
            indices = list(tried)
            if _checksum(indices) != order["checksum"]:
                return f"{name} orders the samples differently from the run that saved, or differently on each rank"
            for layout in ((ranks, rank), *((before, other) for other in range(rank, before, ranks))):
                if list(with_ranks(tried, *layout)) != _share_of(indices, 0, *layout, drop_last=tried.drop_last):
                    return f"{name} does not give the samples of its order to the ranks in turn"
    except Exception as error:  # raised by the program's class, which may not support copies
        return f"{name} cannot be read for another number of ranks ({type(error).__name__}: {error})"
    return None


def _checksum(indices: Iterable[int]) -> int:
    return zlib.crc32(array("q", indices).tobytes())


@contextmanager
def _keep_random_state() -> Iterator[None]:
    python, of_numpy, of_torch = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
