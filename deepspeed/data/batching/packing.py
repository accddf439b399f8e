"""Micro-batches of about equally many tokens out of sequences of different lengths."""

from __future__ import annotations

import logging
import random
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
    """Packs sequences, one after the other, into micro-batches of at most ``max_tokens``; pure, equal on all ranks.

    Left out, with a line that counts them: sequences longer than ``max_tokens``, micro-batches of fewer than
    ``min_batch_size`` sequences, and at the end micro-batches that do not fill a batch.

    Args:
        seqlens: Tokens of each sequence.
        max_tokens: Most tokens of a micro-batch, padding not counted.
        sequence_ids_per_mb: The number of each sequence in the dataset; None: its place in ``seqlens``.
        min_batch_size: Fewest sequences of a micro-batch.
        max_batch_size: Most sequences of a micro-batch; None: as many as fit.
        sequence_picking_order: ``dataloader``: as given; ``random``; ``seqlen``: by length, short ones first.
        effective_batch_size: Micro-batches of one batch: ranks times accumulation steps.
        required_microbatches_of_same_size: All micro-batches of a batch have equally many sequences (pipelines).
        verbose: Log each batch.
        seed: The seed of the random order.

    Returns:
        ``(number of the batch, sequences)`` of each micro-batch; sequences of each batch; longest of each batch.

    Raises:
        ValueError: Unknown order, or nothing fits.
    """
    if sequence_picking_order not in ORDERS:
        raise ValueError(
            f"sequence_picking_order {sequence_picking_order!r} is unknown; use one of {', '.join(ORDERS)}"
        )
    lengths = [int(length) for length in seqlens]
    order = [place for place, length in enumerate(lengths) if length <= max_tokens]
    if len(order) < len(lengths):
        log_dist(
            f"batches by tokens: {len(lengths) - len(order)} of {len(lengths)} sequences are longer than max_tokens "
            f"{max_tokens} and are left out",
            level=logging.WARNING,
        )
    if sequence_picking_order == "random":
        random.Random(seed).shuffle(order)
    elif sequence_picking_order == "seqlen":
        order.sort(key=lambda place: lengths[place])
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
        log_dist(f"batches by tokens: {len(order) - packed} of {len(order)} sequences fill no batch and are left out")
    name = (lambda place: place) if sequence_ids_per_mb is None else sequence_ids_per_mb.__getitem__
    micro_batches = [
        (number, [int(name(place)) for place in micro]) for number, batch in enumerate(batches) for micro in batch
    ]
    sizes = [sum(len(micro) for micro in batch) for batch in batches]
    longest = [max(lengths[place] for micro in batch for place in micro) for batch in batches]
    if verbose:
        for number, batch in enumerate(batches):
            tokens = [sum(lengths[place] for place in micro) for micro in batch]
            log_dist(f"batch {number}: {sizes[number]} sequences up to {longest[number]} tokens; tokens {tokens}")
    return micro_batches, sizes, longest


Batches = list[list[list[int]]]


def _filled(order: list[int], lengths: list[int], limit: int, least: int, most: int, per_batch: int) -> Batches:
    """Returns batches whose micro-batches are filled one after the other, each as far as the limit allows."""
    micro_batches: list[list[int]] = []
    micro: list[int] = []
    tokens = 0
    for place in order:
        if micro and (tokens + lengths[place] > limit or len(micro) == most):
            micro_batches.append(micro)
            micro, tokens = [], 0
        micro.append(place)
        tokens += lengths[place]
    if micro:
        micro_batches.append(micro)
    micro_batches = [each for each in micro_batches if len(each) >= least]
    whole = len(micro_batches) // per_batch * per_batch
    return [micro_batches[start : start + per_batch] for start in range(0, whole, per_batch)]


def _equal(order: list[int], lengths: list[int], limit: int, least: int, most: int, per_batch: int) -> Batches:
    """Returns batches whose micro-batches all have one number of sequences, the largest that fits into each."""
    batches: Batches = []
    start = 0
    while start < len(order):
        best: list[list[int]] = []
        for size in range(min(most, (len(order) - start) // per_batch), least - 1, -1):
            parts = [order[start + size * i : start + size * (i + 1)] for i in range(per_batch)]
            if size and all(sum(lengths[place] for place in part) <= limit for part in parts):
                best = parts
                break
        if not best:
            start += 1  # no batch can begin with this sequence
            continue
        batches.append(best)
        start += per_batch * len(best[0])
    return batches


def scale_lr(base_batch_size: int, batch_size: int, base_lr: float = 1, method: Any = "linear") -> float:
    """Returns the rate for a batch of another size.

    Args:
        base_batch_size: Samples of the batch for which ``base_lr`` was chosen.
        batch_size: Samples of the batch.
        base_lr: The rate there.
        method: ``linear`` (arXiv:1706.02677), ``sqrt`` (arXiv:1404.5997) or ``none``.

    Raises:
        ValueError: Unknown method.
    """
    if method in (None, "none"):
        return base_lr
    if method == "linear":
        return base_lr * batch_size / base_batch_size
    if method == "sqrt":
        return base_lr * (batch_size / base_batch_size) ** 0.5
    raise ValueError(f"lr_scaling_method {method!r} is unknown; use linear, sqrt or none")
