"""Attention in chunks, with keys and values in host memory (FPDT, arXiv 2408.16978)."""

from __future__ import annotations

import math

import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.host_chunks import HostChunks, attend_to_chunks
from deepspeed.parallel.sequence.online import MaskRule


def chunked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    chunk_size: int = 65536,
    offload: bool = True,
    is_causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Computes attention of whole sequences; may be the local attention of ``DistributedAttention``.

    Keys and values are kept in host memory. One chunk at a time is on the device, while the next one is being copied.
    The result is as ``query``, with the width of ``value``.

    Args:
        query: ``[batch, heads, tokens, width]``.
        key: ``[batch, key heads, tokens, width]``; heads are a multiple of key heads.
        value: As ``key``.
        chunk_size: Tokens of a chunk.
        offload: False: keys and values stay on the device; only the computation is in chunks.
        is_causal: Tokens see none that come later.
        window: With ``is_causal``: tokens see themselves and the ``window - 1`` before them.
        scale: The scale of the scores; None: one over the root of the width.

    Raises:
        DeepSpeedConfigError: ``chunk_size`` is below 1.
    """
    if chunk_size < 1:
        raise DeepSpeedConfigError(f"chunked_attention(chunk_size={chunk_size}): expected at least 1 token")
    rule = MaskRule(is_causal, window, 1 / math.sqrt(query.size(-1)) if scale is None else scale)
    copies = HostChunks(query.device)
    chunks = list(zip(*(x.to(query.dtype).split(chunk_size, dim=2) for x in (key, value)), strict=True))
    return attend_to_chunks(query, 0, chunks, rule, copies, offload=offload)
