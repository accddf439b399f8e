"""Log-probabilities, entropies, divergences and losses of logits that may be cut over the vocabulary.

Each rank holds the logits of a range of the vocabulary. Only a few numbers of each row are exchanged: the greatest
logit, sums of exponentials and the logits at the wanted ids (`Shoeybi et al. <https://arxiv.org/abs/1909.08053>`_,
section 3). No tensor that forward or backward makes is larger than the logits of the rank in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from deepspeed.comm.transports.channel import Channel


def as_wide(values: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """Returns values in fp32, or in fp64 if they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32), copy=copy)


def softmax_statistics(
    values: torch.Tensor, rows: list[torch.Tensor], channel: Channel | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Exponentiates logits and normalizes them over all ranks of a channel, which must all call it.

    Args:
        values: ``[rows, vocabulary of this rank]``, fp32 or fp64; overwritten by the exponentials.
        rows: Vectors ``[rows]`` that are added up over the ranks.
        channel: The ranks that share the vocabulary; None: this rank has all of it.

    Returns:
        The exponentials, the factor ``[rows]`` that makes probabilities of them, the logarithm of the sum of all
        exponentials ``[rows]``, and the sums of ``rows``.
    """
    highest = values.amax(-1).clamp(min=torch.finfo(values.dtype).min)  # -inf - -inf would be NaN
    exponentials = values.sub_(highest.unsqueeze(-1)).exp_()
    total = exponentials.sum(-1)
    if channel is None or channel.size == 1:
        return exponentials, total.reciprocal(), total.log() + highest, rows
    stacked = torch.stack([highest, total, *rows])
    parts = torch.stack(channel.gather(stacked, [stacked.shape[-1]] * channel.size, "the parts of a loss"))
    top = parts[:, 0].amax(0)
    total = (parts[:, 1] * (parts[:, 0] - top).exp()).sum(0)
    return exponentials, (highest - top).exp() / total, total.log() + top, list(parts[:, 2:].sum(0))


def local_ids(ids: torch.Tensor, low: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids relative to ``low``, 0 where another rank has them, and where that is."""
    local = ids - low
    elsewhere = (local < 0) | (local >= count)
    return local.masked_fill(elsewhere, 0), elsewhere


class _LogSoftmax(torch.autograd.Function):
    """Log-probabilities ``[rows, k]`` of ``k`` ids in each row of logits ``[rows, vocabulary of this rank]``."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, channel: Channel | None, low: int, columns: int
    ) -> torch.Tensor:
        values = as_wide(logits, copy=True)
        values[:, columns:] = -torch.inf  # no probability
        local, elsewhere = local_ids(ids, low, columns)
        at_ids = values.gather(-1, local).masked_fill(elsewhere, 0.0)
        exponentials, factor, normalizer, sums = softmax_statistics(values, list(at_ids.unbind(-1)), channel)
        ctx.save_for_backward(exponentials.mul_(factor.unsqueeze(-1)), local, elsewhere)
        ctx.dtype = logits.dtype
        return torch.stack(sums, -1) - normalizer.unsqueeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        probabilities, local, elsewhere = ctx.saved_tensors
        of_logits = probabilities * -gradient.sum(-1, keepdim=True)
        of_logits.scatter_add_(-1, local, gradient.masked_fill(elsewhere, 0.0))
        return of_logits.to(ctx.dtype), None, None, None, None


def cut_log_probs(
    logits: torch.Tensor, ids: torch.Tensor, channel: Channel | None, low: int, columns: int | None = None
) -> torch.Tensor:
    """Returns log-probabilities of ids under logits that are cut over the vocabulary. All ranks must call it.

    Args:
        logits: ``[rows, vocabulary of this rank]``, floating.
        ids: ``[rows, k]``, of the whole vocabulary, the same on all ranks.
        channel: The ranks that share the vocabulary; None: this rank has all of it.
        low: The first id of this rank.
        columns: Columns that are no padding; None: all.

    Returns:
        fp32 ``[rows, k]``, the same on all ranks.
    """
    return _LogSoftmax.apply(logits, ids, channel, low, logits.shape[-1] if columns is None else columns)


def cut_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, channel: Channel | None, low: int, ignore_index: int
) -> torch.Tensor:
    """Returns the cross entropy of each row of logits that are cut over the vocabulary. All ranks must call it.

    Args:
        logits: ``(..., vocabulary of this rank)``, floating.
        targets: ``(...)``, ids of the whole vocabulary, the same on all ranks.
        channel: The ranks that share the vocabulary; None: this rank has all of it.
        low: The first id of this rank.
        ignore_index: Target of rows that are left out.

    Returns:
        fp32, in the shape of ``targets``; 0 for rows that are left out.
    """
    flat, ids = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    left_out = ids == ignore_index
    losses = -cut_log_probs(flat, ids.masked_fill(left_out, 0).unsqueeze(-1), channel, low).squeeze(-1)
    return losses.masked_fill(left_out, 0.0).view(targets.shape)


class _Entropy(torch.autograd.Function):
    """Entropies ``[rows]`` of the distributions of logits ``[rows, vocabulary of this rank]``."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, channel: Channel | None) -> torch.Tensor:
        log_probs = _log_softmax(logits, channel)
        entropy = -_summed(_expected(log_probs, log_probs), channel)
        ctx.save_for_backward(log_probs, entropy)
        ctx.dtype = logits.dtype
        return entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        log_probs, entropy = ctx.saved_tensors
        # d H / d x_j = -p_j (log p_j + H)
        return _weighted(log_probs, log_probs + entropy.unsqueeze(-1), -gradient).to(ctx.dtype), None


class _Divergence(torch.autograd.Function):
    """KL(p, q) ``[rows]`` of the distributions of two logits ``[rows, vocabulary of this rank]``."""

    @staticmethod
    def forward(ctx: Any, of_p: torch.Tensor, of_q: torch.Tensor, channel: Channel | None) -> torch.Tensor:
        log_p, log_q = _log_softmax(of_p, channel), _log_softmax(of_q, channel)
        divergence = _summed(_expected(log_p, log_p - log_q), channel)
        ctx.save_for_backward(log_p, log_q, divergence)
        ctx.dtypes = of_p.dtype, of_q.dtype
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        log_p, log_q, divergence = ctx.saved_tensors
        to_p = to_q = None
        if ctx.needs_input_grad[0]:  # p_j (log p_j - log q_j - KL)
            to_p = _weighted(log_p, (log_p - log_q).sub_(divergence.unsqueeze(-1)), gradient).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:  # q_j - p_j
            to_q = log_q.exp().sub_(log_p.exp()).mul_(gradient.unsqueeze(-1)).to(ctx.dtypes[1])
        return to_p, to_q, None


def _log_softmax(logits: torch.Tensor, channel: Channel | None) -> torch.Tensor:
    """Returns fp32 log-probabilities of this rank's part of the vocabulary."""
    wide = as_wide(logits, copy=True)
    normalizer = wide.logsumexp(-1)
    if channel is not None and channel.size > 1:
        parts = channel.gather(normalizer, [normalizer.numel()] * channel.size, "the parts of a normalizer")
        normalizer = torch.stack(parts).logsumexp(0)
    return wide.sub_(normalizer.unsqueeze(-1))


def _expected(log_probs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns the expectation of ``values`` over this rank's part of the vocabulary."""
    return _weighted(log_probs, values, None).sum(-1)


def _weighted(log_probs: torch.Tensor, values: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Returns ``p * values``, times a factor per row; 0 where the probability is 0, whatever the value."""
    products = log_probs.exp().mul_(values).masked_fill_(log_probs == -torch.inf, 0.0)
    return products if factors is None else products.mul_(factors.unsqueeze(-1))


def _summed(rows: torch.Tensor, channel: Channel | None) -> torch.Tensor:
    return rows if channel is None or channel.size == 1 else channel.sum(rows, "the sum over a cut vocabulary")


def cut_entropy(logits: torch.Tensor, channel: Channel | None) -> torch.Tensor:
    """Returns entropies in nats, fp32 ``(...)``, of logits ``(..., vocabulary of this rank)``. All ranks must call."""
    found: torch.Tensor = _Entropy.apply(logits.reshape(-1, logits.shape[-1]), channel)
    return found.view(logits.shape[:-1])


def cut_divergence(of_p: torch.Tensor, of_q: torch.Tensor, channel: Channel | None) -> torch.Tensor:
    """Returns KL(p, q) in nats, fp32 ``(...)``, of two logits ``(..., vocabulary of this rank)``.

    All ranks must call it. Both logits get gradients.
    """
    width = of_p.shape[-1]
    found: torch.Tensor = _Divergence.apply(of_p.reshape(-1, width), of_q.reshape(-1, width), channel)
    return found.view(of_p.shape[:-1])
