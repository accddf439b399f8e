"""Cross entropy over a large vocabulary: without all logits at once, and with logits cut over ranks."""

from __future__ import annotations

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
from deepspeed.parallel.sequence.loss import IGNORED
from deepspeed.parallel.sequence.tiled import run_again
from deepspeed.parallel.vocabulary import cut_cross_entropy
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
        labels: ``[...]``.
        ignore_index: The label that is ignored.
        reduction: The one of torch's ``cross_entropy``; computed in fp32. The mean of nothing is 0.
        token_losses: Computes losses ``[tokens]`` from logits and labels; differs if ``head`` returns logits of a
            part of the vocabulary.

    Returns:
        fp32: 0-dim, or ``[...]`` like ``labels`` with the reduction ``none``.
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
    device, words = vocab_parallel_logits.device, vocab_parallel_logits.size(-1)
    channel = Channel(LocalTransport()) if tp_group is None else axis_of(tp_group, TENSOR).channel(device)
    start = channel.rank * words if vocab_start_index is None else vocab_start_index
    if vocab_end_index is not None and vocab_end_index - start != words:
        raise DeepSpeedConfigError(
            f"vocab_sequence_parallel_cross_entropy: the vocabulary entries {start} to {vocab_end_index} "
            f"are {vocab_end_index - start}, but the logits have {words}; pass the range of this rank"
        )
    loss = cut_cross_entropy(vocab_parallel_logits, target, channel, start, ignore_index)
    count = (target != ignore_index).sum()
    axis = axis_of(sp_group, SEQUENCE)
    if gather_sequence_loss and axis.size > 1:
        loss = gather_tokens(loss, axis, own_share=own_share)
        count = torch.cat(axis.channel(device).gather(count.view(1), [1] * axis.size, _COUNTS)).sum()
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / count.clamp(min=1)


@uncompiled
def gather_tokens(loss: torch.Tensor, axis: Axis, *, own_share: bool) -> torch.Tensor:
    """Returns ``[tokens, batch]`` of all ranks, rank after rank; ``own_share`` as in ``mean_loss``."""
    if axis.size == 1:
        return loss
    if not own_share and torch.is_grad_enabled() and loss.requires_grad:
        backward_comm.note_anywhere()
    label = "the losses of tokens (sequence parallel)"
    return gather_from(loss, axis.channel(loss.device), 0, is_partial=not own_share, label=label)
