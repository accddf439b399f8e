"""Rows of tokens in 8 bits: an integer per element and a factor for each block of a row.

One factor per 128 elements of a token is what DeepSeek-V3 sends to experts by (`technical report
<https://arxiv.org/abs/2412.19437>`_, section 3.3), where elements are fp8.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812

BLOCK = 128
"""Elements of a row that share a factor."""


def coded_width(width: int) -> int:
    """Returns the bytes of a coded row of ``width`` elements."""
    return width + 4 * -(-width // BLOCK)


def encode_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns the codes of floating rows ``[n, width]``: uint8 ``[n, coded_width(width)]``.

    An element is off by half a step at most: 1/254 of the largest one of its block. A block with an element that is not
    finite is not finite when it is decoded.
    """
    count, width = rows.shape
    blocks = F.pad(rows.float(), (0, -width % BLOCK)).view(count, -(-width // BLOCK), BLOCK)
    scales = blocks.abs().amax(dim=-1) / 127
    codes = (blocks / scales.masked_fill(scales == 0, 1).unsqueeze(-1)).round_().nan_to_num_(0.0).to(torch.int8)
    body = codes.flatten(1)[:, :width].contiguous()
    factors = scales.flatten().view(torch.uint8).view(count, 4 * scales.shape[1])
    return torch.cat((body.view(torch.uint8), factors), dim=1)


def decode_rows(codes: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the rows ``[n, width]`` of ``codes``, in ``dtype``."""
    count = len(codes)
    copied = torch.contiguous_format  # into memory of its own, as bytes are aligned for factors there
    scales = codes[:, width:].clone(memory_format=copied).view(torch.float32)
    body = F.pad(codes[:, :width].clone(memory_format=copied).view(torch.int8).float(), (0, -width % BLOCK))
    blocks = body.view(count, -(-width // BLOCK), BLOCK) * scales.unsqueeze(-1)
    return blocks.flatten(1)[:, :width].to(dtype)
