"""The cross-entropy of logits that are cut over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from deepspeed.comm.transports.channel import Channel


class _CrossEntropy(torch.autograd.Function):
    """Negative log-likelihoods of rows of logits that are cut over the vocabulary; 3 numbers of each row are sent."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, channel: Channel, low: int) -> torch.Tensor:
        values = logits.float()
        highest = values.amax(-1).clamp(min=torch.finfo(values.dtype).min)  # -inf - -inf would be NaN
        exponentials = (values - highest.unsqueeze(-1)).exp_()
        local = targets - low
        elsewhere = (local < 0) | (local >= values.shape[-1])
        local = local.masked_fill(elsewhere, 0)
        mine = values.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        stacked = torch.stack([highest, exponentials.sum(-1), mine])
        parts = torch.stack(channel.gather(stacked, [stacked.shape[-1]] * channel.size, "the parts of a loss"))
        top = parts[:, 0].amax(0)
        total = (parts[:, 1] * (parts[:, 0] - top).exp()).sum(0)
        probabilities = exponentials.mul_(((highest - top).exp() / total).unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() + top - parts[:, 2].sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, local, elsewhere = ctx.saved_tensors
        of_logits = probabilities * gradient.unsqueeze(-1)
        of_logits.scatter_add_(-1, local.unsqueeze(-1), -gradient.masked_fill(elsewhere, 0.0).unsqueeze(-1))
        return of_logits.to(ctx.dtype), None, None, None


def cut_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, channel: Channel, low: int, ignore_index: int
) -> torch.Tensor:
    """Returns the cross-entropy of each row of logits. All ranks of the channel must call it.

    Args:
        logits: ``(..., vocabulary of this rank)``, floating.
        targets: ``(...)``, ids of the whole vocabulary, the same on all ranks.
        channel: The ranks that share the vocabulary.
        low: The first id of this rank.
        ignore_index: Target of rows that are left out.

    Returns:
        fp32, in the shape of ``targets``; 0 for rows that are left out.
    """
    flat, ids = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    left_out = ids == ignore_index
    losses: torch.Tensor = _CrossEntropy.apply(flat, ids.masked_fill(left_out, 0), channel, low)
    return losses.masked_fill(left_out, 0.0).view(targets.shape)
