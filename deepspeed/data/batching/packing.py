"""Packs sequences of different lengths into micro-batches of about equal numbers of tokens."""

from __future__ import annotations

import itertools
import logging
import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from deepspeed.logging import log_dist

ORDERS = ("dataloader", "random", "seqlen")


def batch_by_seqlens(
    seqlens: Sequence[int],
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[tuple[int, list[int]]], list[int], list[int]]:
    """Packs sequences, in order, into micro-batches of at most ``max_tokens``. All ranks compute the same result.

    Left out, and counted in the log: sequences longer than ``max_tokens``, micro-batches of fewer than
    ``min_batch_size`` sequences, and the last micro-batches, which do not fill a batch.

    Args:
        sequence_ids_per_mb: The index of each sequence in the dataset; None: its index in ``seqlens``.
        sequence_picking_order: ``dataloader`` (the order of ``seqlens``), ``random``, or ``seqlen`` (short ones first).
        effective_batch_size: Number of micro-batches in a batch: ranks times accumulation steps.
        required_microbatches_of_same_size: Give all micro-batches of a batch the same number of sequences (pipelines).

    Returns:
        For each micro-batch the number of its batch and its sequences; for each batch the number of its sequences; for
        each batch the length of its longest sequence.

    Raises:
        ValueError: The order is unknown, or no batch can be made.
    """
    if sequence_picking_order not in ORDERS:
        raise ValueError(
            f"sequence_picking_order: expected one of {', '.join(ORDERS)}; found {sequence_picking_order!r}"
        )
    lengths = [int(length) for length in seqlens]
    order = [index for index, length in enumerate(lengths) if length <= max_tokens]
    if len(order) < len(lengths):
        log_dist(
            f"batches by tokens: {len(lengths) - len(order)} of {len(lengths)} sequences are longer than max_tokens "
            f"{max_tokens} and are left out",
            level=logging.WARNING,
        )
    if sequence_picking_order == "random":
        random.Random(seed).shuffle(order)
    elif sequence_picking_order == "seqlen":
        order.sort(key=lambda index: lengths[index])
    most = max_batch_size or len(order)
    if required_microbatches_of_same_size:
        batches = _equal(order, lengths, max_tokens, min_batch_size, most, effective_batch_size)
    else:
        batches = _filled(order, lengths, max_tokens, min_batch_size, most, effective_batch_size)
    packed = sum(len(micro) for batch in batches for micro in batch)
    if not batches:
        raise ValueError(
            f"no batch of {effective_batch_size} micro-batches of {min_batch_size} to {most} sequences with at most "
            f"{max_tokens} tokens can be made of {len(order)} sequences; raise max_tokens, lower min_batch_size, or "
            "use fewer accumulation steps"
        )
    if packed < len(order):
        log_dist(
            f"batches by tokens: {len(order) - packed} of {len(order)} sequences do not fill a batch and are left out"
        )
    name = (lambda index: index) if sequence_ids_per_mb is None else sequence_ids_per_mb.__getitem__
    micro_batches = [
        (number, [int(name(index)) for index in micro]) for number, batch in enumerate(batches) for micro in batch
    ]
    sizes = [sum(len(micro) for micro in batch) for batch in batches]
    longest = [max(lengths[index] for micro in batch for index in micro) for batch in batches]
    if verbose:
        for number, batch in enumerate(batches):
            tokens = [sum(lengths[index] for index in micro) for micro in batch]
            log_dist(f"batch {number}: {sizes[number]} sequences up to {longest[number]} tokens; tokens {tokens}")
    return micro_batches, sizes, longest


Batches = list[list[list[int]]]


def _filled(order: list[int], lengths: list[int], limit: int, least: int, most: int, per_batch: int) -> Batches:
    """Returns batches whose micro-batches are filled one by one, each up to the limit of tokens."""
    micro_batches: list[list[int]] = []
    micro: list[int] = []
    tokens = 0
    for index in order:
        if micro and (tokens + lengths[index] > limit or len(micro) == most):
            micro_batches.append(micro)
            micro, tokens = [], 0
        micro.append(index)
        tokens += lengths[index]
    if micro:
        micro_batches.append(micro)
    micro_batches = [each for each in micro_batches if len(each) >= least]
    stop = len(micro_batches) // per_batch * per_batch
    return [micro_batches[start : start + per_batch] for start in range(0, stop, per_batch)]


def _equal(order: list[int], lengths: list[int], limit: int, least: int, most: int, per_batch: int) -> Batches:
    """Returns batches whose micro-batches have the same number of sequences, the largest that the limit allows."""
    batches: Batches = []
    sums = [0, *itertools.accumulate(lengths[index] for index in order)]  # tokens before each place of the order
    start = 0
    while start < len(order):
        best: list[list[int]] = []
        fits = bisect_right(sums, sums[start] + limit) - 1 - start  # sequences in the first micro-batch at most
        for size in range(min(most, fits, (len(order) - start) // per_batch), least - 1, -1):
            bounds = [start + size * i for i in range(per_batch + 1)]
            if size and all(sums[stop] - sums[first] <= limit for first, stop in itertools.pairwise(bounds)):
                best = [order[first:stop] for first, stop in itertools.pairwise(bounds)]
                break
        if not best:
            start += 1  # no batch can start with this sequence
            continue
        batches.append(best)
        start += per_batch * len(best[0])
    return batches


def scale_lr(base_batch_size: int, batch_size: int, base_lr: float = 1, method: Any = "linear") -> float:
    """Returns the rate for another batch size: ``linear`` (arXiv:1706.02677), ``sqrt`` (arXiv:1404.5997) or ``none``.

    Raises:
        ValueError: The method is unknown.
    """
    if method in (None, "none"):
        return base_lr
    if method == "linear":
        return base_lr * batch_size / base_batch_size
    if method == "sqrt":
        return base_lr * (batch_size / base_batch_size) ** 0.5
    raise ValueError(f"lr_scaling_method: expected linear, sqrt or none; found {method!r}")
