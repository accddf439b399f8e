"""Softmax over the rows of a block-sparse matrix of scores."""

from __future__ import annotations

import torch

from deepspeed.ops.sparse_attention.bias import additive, position_bias


class Softmax:
    """Scales, adds masks, and takes the softmax of the blocks of each row of a 0-1 ``[heads, rows, columns]``."""

    def __init__(self, layout: torch.Tensor, block: int, bench: bool = False) -> None:
        self.layout, self.block = (layout.unsqueeze(0) if layout.dim() == 2 else layout), block
        self._entries = self.layout.nonzero().T

    def __call__(
        self,
        x: torch.Tensor,
        scale: float = 1.0,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
    ) -> torch.Tensor:
        """Returns the probabilities, in the shape of the scores; rows that see nothing are zero.

        Args:
            x: ``[batch, entries, block, block]``, entries in the order of ``layout.nonzero()``; not written to.
            scale: Multiplied with the scores first.
            rpe: Added to the scaled scores: ``[length, length]``, with heads or batch and heads before it, or 1.
            key_padding_mask: ``[batch, length]``.
            attn_mask: ``[length, length]``.
            key_padding_mask_mode: ``add``, or ``mul``: 0 hides.
            attn_mask_mode: ``add``, or ``mul``: 0 hides.
        """
        heads, rows, columns = (index.to(x.device) for index in self._entries)
        scores = x * scale
        side = self.layout.size(1) * self.block, self.layout.size(2) * self.block
        if rpe is not None:
            shape = x.size(0), self.layout.size(0), *side
            bias = position_bias(rpe, shape, x.dtype).expand(shape)
            scores = scores + self._blocks(bias)[:, heads, rows, columns]
        if attn_mask is not None:
            added = additive(attn_mask.reshape(side), attn_mask_mode, "attn_mask", x.dtype)
            scores = scores + self._blocks(added.view(1, 1, *side))[:, 0, rows, columns]
        if key_padding_mask is not None:
            mask = key_padding_mask.reshape(-1, side[1]).expand(x.size(0), side[1])
            added = additive(mask, key_padding_mask_mode, "key_padding_mask", x.dtype)
            scores = scores + added.unflatten(1, (-1, self.block))[:, columns].unsqueeze(2)
        row = heads * self.layout.size(1) + rows  # of blocks, over all heads
        return self._normalized(scores, row)

    def _blocks(self, dense: torch.Tensor) -> torch.Tensor:
        return dense.unflatten(3, (-1, self.block)).unflatten(2, (-1, self.block)).transpose(3, 4)

    def _normalized(self, scores: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        batch, entries, block, _ = scores.shape
        index = row.view(1, -1, 1).expand(batch, entries, block)
        lines = (batch, self.layout.size(0) * self.layout.size(1), block)
        most = scores.detach().amax(-1)
        top = most.new_full(lines, float("-inf")).scatter_reduce(1, index, most, "amax")
        top = top.masked_fill(torch.isneginf(top), 0.0)
        powers = torch.exp(scores - top.gather(1, index).unsqueeze(3))
        sums = powers.new_zeros(lines).scatter_add(1, index, powers.sum(-1))
        sums = sums.masked_fill(sums == 0, 1.0)
        return powers / sums.gather(1, index).unsqueeze(3)
