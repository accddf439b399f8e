"""Scaled dot-product attention over whole sequences without a mask of tokens by tokens.

Documents are attended to one after the other, a sliding window block by block: memory grows with the length and not
with its square.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from deepspeed.parallel.sequence.documents import Documents

_BLOCK = 512  # least number of queries at once under a window


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    documents: Documents | None = None,
    is_causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention.

    Args:
        query: ``[batch, heads, tokens, width]``.
        key: ``[batch, key heads, tokens, width]``; heads are a multiple of key heads.
        value: As ``key``.
        documents: Who sees whom; None: every sequence is one document.
        is_causal: Tokens see none that come later.
        window: With ``is_causal``: tokens see themselves and the ``window - 1`` before them.
        scale: Of the scores; None: one over the root of the width.
        dropout: Of the probabilities.

    Returns:
        ``[batch, heads, tokens, width of value]``.
    """
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout}
    if documents is None:
        return _attend(query, key, value, is_causal, window, options)
    if all(row.order is None and row.lengths == documents[0].lengths for row in documents):
        cut = zip(*(tensor.split(documents[0].lengths, dim=2) for tensor in (query, key, value)), strict=True)
        return torch.cat([_attend(q, k, v, is_causal, window, options) for q, k, v in cut], dim=2)
    rows = []
    for number, row in enumerate(documents):
        parts = [tensor[number : number + 1] for tensor in (query, key, value)]
        order = None if row.order is None else row.order.to(query.device)
        if order is not None:
            parts = [part.index_select(2, order) for part in parts]
        if not row.lengths:
            rows.append(query.new_zeros((1, *query.shape[1:-1], value.size(-1))))
            continue
        cut = zip(*(part.split(row.lengths, dim=2) for part in parts), strict=True)
        out = torch.cat([_attend(q, k, v, is_causal, window, options) for q, k, v in cut], dim=2)
        if order is not None:
            out = out.new_zeros((*out.shape[:2], query.size(2), out.size(3))).index_copy(2, order, out)
        rows.append(out)
    return torch.cat(rows)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    window: int | None,
    options: dict[str, Any],
) -> torch.Tensor:
    tokens = query.size(2)
    if query.size(1) != key.size(1):
        options = {**options, "enable_gqa": True}
    if window is None or window >= tokens or not is_causal:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, **options)
    parts = []
    for start, stop in _blocks(tokens, max(window, _BLOCK)):
        first = max(start - window + 1, 0)
        near = torch.arange(start, stop, device=query.device)[:, None] - torch.arange(first, stop, device=query.device)
        mask = (near >= 0) & (near < window)
        parts.append(
            functional.scaled_dot_product_attention(
                query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop], attn_mask=mask, **options
            )
        )
    return torch.cat(parts, dim=2)


def _blocks(tokens: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, tokens, size):
        yield start, min(start + size, tokens)
