"""Cross entropy over a large vocabulary: without all logits at once, and with logits cut over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from deepspeed.axes import SEQUENCE, TENSOR
from deepspeed.comm.job import backward_comm
from deepspeed.comm.job.axis import Axis
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.differentiable import gather_from
from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.head import losses_of_logits
from deepspeed.ops.fused_loss import linear_cross_entropy
from deepspeed.ops.vocabulary import cut_cross_entropy, cut_divergence, cut_entropy, cut_log_probs
from deepspeed.parallel.sequence.loss import IGNORED, sum_over_ranks
from deepspeed.parallel.sequence.tiled import run_again
from deepspeed.uncompiled import uncompiled

_COUNTS = "the counts of tokens (sequence parallel)"

TILE = 2048
"""Tokens whose logits exist at once."""


def chunked_cross_entropy(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    labels: torch.Tensor,
    *,
    ignore_index: int = IGNORED,
    tile_tokens: int = TILE,
    reduction: Literal["mean", "sum", "none"] = "mean",
    token_losses: Callable[..., torch.Tensor] = losses_of_logits,
) -> torch.Tensor:
    """Returns the cross entropy of hidden states; logits exist for one tile of tokens at a time, also in backward.

    Args:
        hidden: ``[..., width]``.
        head: Module or function from ``[tokens, width]`` to logits ``[tokens, vocabulary]``.
        labels: ``[...]``; ``ignore_index`` is left out.
        reduction: The one of torch's ``cross_entropy``; computed in fp32. The mean of nothing is 0.
        token_losses: Computes losses ``[tokens]`` from logits and labels; differs if ``head`` returns logits of a part
            of the vocabulary.

    The result is fp32: 0-dim, or ``[...]`` like ``labels`` with the reduction ``none``.
    """

    def losses(tile: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return token_losses(head(tile), wanted, ignore_index=ignore_index)

    flat, wanted = hidden.reshape(-1, hidden.size(-1)), labels.reshape(-1).to(hidden.device)
    tiles = zip(flat.split(tile_tokens), wanted.split(tile_tokens), strict=True)
    found = torch.cat([run_again(losses, *tile) for tile in tiles])
    if reduction == "none":
        return found.view(labels.shape)
    return found.sum() if reduction == "sum" else found.sum() / (wanted != ignore_index).sum().clamp(min=1)


@uncompiled
def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    sp_group: Any,
    tp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = IGNORED,
    reduction: Literal["mean", "sum", "none"] = "none",
    gather_sequence_loss: bool = True,
    backend: str = "torch",
    *,
    own_share: bool = False,
) -> torch.Tensor:
    """Returns the cross entropy of logits whose tokens, and perhaps vocabulary, are cut over ranks.

    Every rank of the groups must call it and run its backward, which sums the gradients of gathered losses
    over ``sp_group`` unless ``own_share`` (see ``mean_loss``).

    Args:
        vocab_parallel_logits: ``[this rank's tokens, batch, this rank's vocabulary]``.
        target: ``[this rank's tokens, batch]``, ids in the whole vocabulary.
        sp_group: Torch process group of the ranks that share a sequence.
        tp_group: Group of the ranks that share the vocabulary; None: each has all.
        vocab_start_index: First id of this rank; None: equal parts in the order of the ranks.
        vocab_end_index: One more than its last id; only checked.
        ignore_index: Targets that do not count; their loss is 0.
        reduction: ``none``: one loss per token; else over the tokens that count.
        gather_sequence_loss: Return the losses of all tokens, ``[tokens, batch]``; else those of this rank's.
        backend: Only ``torch``.
        own_share: Back-propagate only this rank's share of the mean.

    Raises:
        DeepSpeedConfigError: The indices do not fit the logits, or the backend is another one.
    """
    if backend != "torch":
        raise DeepSpeedConfigError(
            f'vocab_sequence_parallel_cross_entropy(backend="{backend}"): there is only "torch"; leave the argument out'
        )
    name = "vocab_sequence_parallel_cross_entropy"
    channel, low, _ = _columns_of(name, vocab_parallel_logits, tp_group, vocab_start_index, vocab_end_index)
    loss = cut_cross_entropy(vocab_parallel_logits, target, channel, low, ignore_index)
    count = (target != ignore_index).sum()
    axis = axis_of(sp_group, SEQUENCE)
    if gather_sequence_loss and axis.size > 1:
        loss = gather_tokens(loss, axis, own_share=own_share)
        count = torch.cat(axis.channel(loss.device).gather(count.view(1), [1] * axis.size, _COUNTS)).sum()
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / count.clamp(min=1)


def _columns_of(
    name: str, logits: torch.Tensor, tp_group: Any, start: int | None, end: int | None
) -> tuple[Channel, int, int]:
    """Returns the ranks that share a vocabulary, the first id of this rank, and the size of the whole vocabulary.

    All ranks of ``tp_group`` must call it.
    """
    words = logits.size(-1)
    channel = Channel(LocalTransport()) if tp_group is None else axis_of(tp_group, TENSOR).channel(logits.device)
    low = channel.rank * words if start is None else start
    if end is not None and end - low != words:
        raise DeepSpeedConfigError(
            f"{name}: the vocabulary entries {low} to {end} are {end - low}, but the logits have {words}; pass the "
            "range of this rank"
        )
    if start is None or channel.size == 1:
        return channel, low, words * channel.size if start is None else low + words
    last = torch.tensor([low + words], device=logits.device)
    return channel, low, int(channel.largest(last, "the size of a vocabulary"))


@uncompiled
def vocab_parallel_logprobs(
    vocab_parallel_logits: torch.Tensor,
    index: torch.Tensor,
    tp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = IGNORED,
) -> torch.Tensor:
    """Returns log-probabilities of tokens under logits that are cut over the vocabulary.

    Every rank of ``tp_group`` must call it; only its logits' gradient is computed, without communication.

    Args:
        vocab_parallel_logits: ``[..., this rank's vocabulary]``, floating.
        index: ``[...]`` or ``[..., k]``, ids in the whole vocabulary, the same on all ranks.
        tp_group: Torch process group of the ranks that share the vocabulary; None: each has all.
        vocab_start_index: First id of this rank; None: equal parts in the order of the ranks.
        vocab_end_index: One more than its last id; only checked.
        global_vocab_size: Columns from this id on are padding: no probability, no gradient. None: there is none.
        ignore_index: Ids whose log-probability is 0, without a gradient.

    Returns:
        fp32, in the shape of ``index``.

    Raises:
        DeepSpeedConfigError: Shapes or ranges do not fit.
        IndexError: An id is outside the vocabulary (checked on CPUs, where it costs no wait).
    """
    name = "vocab_parallel_logprobs"
    places = vocab_parallel_logits.shape[:-1]
    if places not in (index.shape, index.shape[:-1]):
        raise DeepSpeedConfigError(
            f"{name}: expected an index of shape {list(places)}, or with one dimension more for several tokens a "
            f"place, found {list(index.shape)}; pass ids for the logits {list(vocab_parallel_logits.shape)}"
        )
    channel, low, size = _columns_of(name, vocab_parallel_logits, tp_group, vocab_start_index, vocab_end_index)
    size = size if global_vocab_size is None else min(size, global_vocab_size)
    is_ignored = index == ignore_index
    if index.device.type == "cpu" and bool((((index < 0) | (index >= size)) & ~is_ignored).any()):
        raise IndexError(
            f"{name}: expected ids from 0 to {size - 1}, or ignore_index={ignore_index}, found ids from "
            f"{int(index.min())} to {int(index.max())}; use the tokenizer of this model"
        )
    width = vocab_parallel_logits.shape[-1]
    columns = min(max(size - low, 0), width)
    ids = index.masked_fill(is_ignored, 0).reshape(math.prod(places), -1)
    found = cut_log_probs(vocab_parallel_logits.reshape(-1, width), ids, channel, low, columns)
    return found.view(index.shape).masked_fill(is_ignored, 0.0)


@uncompiled
def vocab_parallel_entropy(vocab_parallel_logits: torch.Tensor, tp_group: Any = None) -> torch.Tensor:
    """Returns entropies in nats, fp32 ``[...]``, of logits ``[..., this rank's vocabulary]``.

    Every rank of ``tp_group`` (None: each has the whole vocabulary) must call it.
    """
    return cut_entropy(vocab_parallel_logits, _columns_of("", vocab_parallel_logits, tp_group, None, None)[0])


@uncompiled
def vocab_parallel_kl_div(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, reverse: bool = False, tp_group: Any = None
) -> torch.Tensor:
    """Returns divergences in nats, fp32 ``[...]``: KL(teacher, student), or KL(student, teacher) if ``reverse``.

    Every rank of ``tp_group`` must call it. Both logits get gradients.

    Args:
        student_logits: ``[..., this rank's vocabulary]``, floating.
        teacher_logits: The same shape.
        tp_group: Torch process group of the ranks that share the vocabulary; None: each has all.

    Raises:
        DeepSpeedConfigError: The shapes differ.
    """
    if student_logits.shape != teacher_logits.shape:
        raise DeepSpeedConfigError(
            "vocab_parallel_kl_div: expected logits of one shape, found "
            f"{list(student_logits.shape)} and {list(teacher_logits.shape)}; pass those of the same tokens"
        )
    channel = _columns_of("", student_logits, tp_group, None, None)[0]
    if reverse:
        return cut_divergence(student_logits, teacher_logits, channel)
    return cut_divergence(teacher_logits, student_logits, channel)


@uncompiled
def vocab_parallel_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    tp_group: Any = None,
    sp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = IGNORED,
    reduction: Literal["mean", "sum", "none"] = "mean",
    chunk_size: int | None = None,
    *,
    own_share: bool = False,
) -> torch.Tensor:
    """Returns the cross entropy of hidden states by a head that is cut over the vocabulary, without whole logits.

    Every rank of the groups must call it and run its backward.

    Args:
        hidden: ``[..., width]``, equal on the ranks of ``tp_group``; each gets its whole gradient.
        weight: ``[this rank's vocabulary, width]``.
        target: ``[...]``, ids in the whole vocabulary; not shifted here.
        bias: ``[this rank's vocabulary]``.
        tp_group: Torch process group of the ranks that share the vocabulary; None: each has all.
        sp_group: Group of the ranks that share a sequence: sum and mean are over the tokens of all of them.
        vocab_start_index: First id of this rank; None: equal parts in the order of the ranks.
        vocab_end_index: One more than its last id; only checked.
        ignore_index: Targets that do not count.
        reduction: ``none``: fp32 ``[...]``; computes the product twice.
        chunk_size: Rows of hidden states whose logits exist at once; None: chosen.
        own_share: Back-propagate only this rank's share over ``sp_group`` (see ``mean_loss``).

    Raises:
        DeepSpeedConfigError: Shapes or ranges do not fit.
    """
    name = "vocab_parallel_linear_cross_entropy"
    if chunk_size is not None and chunk_size < 1:
        raise DeepSpeedConfigError(f"{name}(chunk_size={chunk_size}): expected a number of rows from 1 on; pass one")
    channel, low, size = _columns_of(name, weight.t(), tp_group, vocab_start_index, vocab_end_index)
    found = linear_cross_entropy(
        hidden,
        weight,
        target,
        bias,
        ignore_index,
        reduction="none" if reduction == "none" else "sum",
        channel=channel,
        low=low,
        vocabulary=size,
        chunk_rows=chunk_size,
    )
    return found if reduction == "none" else _over_sequence(found, target, sp_group, ignore_index, reduction, own_share)


def _over_sequence(
    total: torch.Tensor, target: torch.Tensor, sp_group: Any, ignore_index: int, reduction: str, own_share: bool
) -> torch.Tensor:
    """Returns the sum of losses over the ranks of a sequence, or their mean over all counted tokens."""
    count = (target != ignore_index).sum().to(total.device, total.dtype)
    if sp_group is not None:
        total, count = sum_over_ranks(torch.stack((total, count)), sp_group, own_share=own_share).unbind()
    return total if reduction == "sum" else total / count.detach().clamp(min=1)


class VocabParallelCrossEntropyLoss(torch.nn.Module):
    """The cross entropy of logits whose vocabulary, and perhaps tokens, are cut over ranks, as a module.

    Called with logits ``[..., this rank's vocabulary]`` and targets ``[...]``. Every rank of the groups must call it
    and run its backward. With ``sp_group`` sum and mean are over the tokens of all its ranks.

    Args:
        tp_group: As the other arguments, see :func:`vocab_sequence_parallel_cross_entropy`.
        gather_sequence_loss: With the reduction ``none``: return the losses of all ranks' tokens, which lie along the
            first dimension.
        backend: ``"torch"``, or ``"liger"``, which is the same: there is one loss of logits that exist.

    Raises:
        DeepSpeedConfigError: The backend or the reduction is another one.
    """

    def __init__(
        self,
        tp_group: Any = None,
        sp_group: Any = None,
        vocab_start_index: int | None = None,
        vocab_end_index: int | None = None,
        ignore_index: int = IGNORED,
        reduction: Literal["mean", "sum", "none"] = "mean",
        gather_sequence_loss: bool = False,
        backend: str = "torch",
    ) -> None:
        super().__init__()
        for key, value, known in (
            ("backend", backend, ("torch", "liger")),
            ("reduction", reduction, ("mean", "sum", "none")),
        ):
            if value not in known:
                raise DeepSpeedConfigError(
                    f'VocabParallelCrossEntropyLoss({key}="{value}"): expected one of {", ".join(known)}; pass one'
                )
        self.tp_group, self.sp_group = tp_group, sp_group
        self.vocab_start_index, self.vocab_end_index = vocab_start_index, vocab_end_index
        self.ignore_index, self.reduction = ignore_index, reduction
        self.gather_sequence_loss, self.backend = gather_sequence_loss, backend

    @uncompiled
    def forward(self, vocab_parallel_logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the loss, fp32: 0-dim, or with the reduction ``none`` a loss for each target."""
        channel, low, _ = _columns_of(
            type(self).__name__, vocab_parallel_logits, self.tp_group, self.vocab_start_index, self.vocab_end_index
        )
        losses = cut_cross_entropy(vocab_parallel_logits, target, channel, low, self.ignore_index)
        if self.reduction != "none":
            return _over_sequence(losses.sum(), target, self.sp_group, self.ignore_index, self.reduction, False)
        if self.sp_group is None or not self.gather_sequence_loss:
            return losses
        return gather_tokens(losses, axis_of(self.sp_group, SEQUENCE), own_share=False)


@uncompiled
def gather_tokens(loss: torch.Tensor, axis: Axis, *, own_share: bool) -> torch.Tensor:
    """Returns ``[tokens, batch]`` of all ranks, rank after rank; ``own_share`` as in ``mean_loss``."""
    if axis.size == 1:
        return loss
    if not own_share and torch.is_grad_enabled() and loss.requires_grad:
        backward_comm.note_anywhere()
    label = "the losses of tokens (sequence parallel)"
    return gather_from(loss, axis.channel(loss.device), 0, is_partial=not own_share, label=label)
