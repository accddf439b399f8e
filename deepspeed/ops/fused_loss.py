"""Cross entropy of hidden states without whole logits, and of logits without whole copies in fp32.

The head's product, the loss and its gradient are computed for one chunk of rows after the other, so logits exist for
one chunk only (Liger kernel, `Hsu et al. <https://arxiv.org/abs/2410.10989>`_, section 3.2). Losses that are added up
need three products of the head in all: the gradients of hidden states and weight are computed beside the loss, as the
gradient of a sum is the same for every row, and backward multiplies them by one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.differentiable import copy_to
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.head import IGNORED, use_loss_function
from deepspeed.ops.vocabulary import as_wide, local_ids, softmax_statistics

ReductionName = Literal["mean", "sum", "none"]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORED,
    softcap: float | None = None,
    reduction: ReductionName = "mean",
    num_items_in_batch: torch.Tensor | int | None = None,
    *,
    channel: Channel | None = None,
    low: int = 0,
    vocabulary: int | None = None,
    sums_hidden_gradient: bool = True,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Returns the cross entropy of ``hidden @ weight.T + bias``; logits exist for one chunk of rows at a time.

    On a device the chunks are Liger's kernel where ``liger_kernel`` is installed (reduction ``mean`` or ``sum``), else
    compiled; on CPUs they are torch's operations. A chunk of logits is as large as ``hidden``.

    Args:
        hidden: ``[..., width]``, floating.
        weight: ``[vocabulary, width]``, in the dtype of ``hidden`` (under autocast both are cast).
        labels: ``[...]``, ids of the vocabulary; not shifted here.
        bias: ``[vocabulary]``.
        ignore_index: The label of rows that do not count.
        softcap: Logits become ``softcap * tanh(logits / softcap)``, as in Gemma.
        reduction: ``mean``: over the rows that count, 0 where none does. ``none`` computes the product twice.
        num_items_in_batch: Divisor of the sum in place of the number of rows that count; for ``mean``.
        channel: Ranks that share the vocabulary: ``weight`` and ``bias`` are this rank's rows, ``hidden`` and
            ``labels`` are equal on all of them, and so is the gradient of ``hidden``. All must call it and its
            backward. None: this rank has the whole vocabulary.
        low: The first id of this rank's rows.
        vocabulary: The size of the whole vocabulary; None: the parts of the ranks are equal.
        sums_hidden_gradient: False leaves it to the caller to sum the gradient of ``hidden`` over the channel.
        chunk_rows: Rows of a chunk, equal on all ranks; None: chosen.

    Returns:
        fp32: 0-dim, or ``[...]`` with the reduction ``none``.

    Raises:
        DeepSpeedConfigError: Shapes do not fit, or the reduction is another one.
        IndexError: A label is outside the vocabulary (checked on CPUs, where it costs no wait).
    """
    _check(hidden, weight, labels, bias, reduction)
    device = hidden.device.type
    if channel is not None and sums_hidden_gradient:
        hidden = copy_to(hidden, channel, "the gradient of hidden states")
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows, ids = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).to(hidden.device)
    is_counted = ids != ignore_index
    if channel is None or channel.size == 1:
        channel = None
        _refuse_unknown(ids, is_counted, weight.shape[0])
    with torch.autocast(device, enabled=False):
        if reduction != "none" and channel is None and chunk_rows is None and _has_liger(device):
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            loss = LigerFusedLinearCrossEntropyLoss(
                ignore_index=ignore_index, reduction="sum", softcap=softcap, accum_dtype=torch.float32
            )
            found: torch.Tensor = loss(weight, rows, ids, bias)
            losses = found.float()
        else:
            part = weight.shape[0] if vocabulary is None or channel is None else math.ceil(vocabulary / channel.size)
            size = chunk_rows or math.ceil(rows.shape[0] / math.ceil(part / max(rows.shape[1], 1)))
            how = _Settings(softcap, channel, low, max(size, 1), reduction != "none", torch.is_grad_enabled())
            losses = _Losses.apply(rows, weight, bias, ids, is_counted, how)
    if reduction == "none":
        return losses.view(labels.shape)
    if reduction == "sum":
        return losses
    return losses / (is_counted.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None, reduction: str
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise DeepSpeedConfigError(
            f'linear_cross_entropy(reduction="{reduction}"): expected "mean", "sum" or "none"; pass one of them'
        )
    if labels.shape != hidden.shape[:-1] or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise DeepSpeedConfigError(
            "linear_cross_entropy: expected hidden [..., width], weight [vocabulary, width] and labels [...], found "
            f"{list(hidden.shape)}, {list(weight.shape)} and {list(labels.shape)}; pass tensors that fit together"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise DeepSpeedConfigError(
            f"linear_cross_entropy: expected a bias of shape [{weight.shape[0]}], found {list(bias.shape)}; pass one "
            "value for each row of the weight"
        )


def _refuse_unknown(ids: torch.Tensor, is_counted: torch.Tensor, vocabulary: int) -> None:
    if ids.device.type == "cpu" and bool((((ids < 0) | (ids >= vocabulary)) & is_counted).any()):
        counted = ids[is_counted]
        raise IndexError(
            f"linear_cross_entropy: expected labels from 0 to {vocabulary - 1}, the ids of the vocabulary, found some "
            f"from {int(counted.min())} to {int(counted.max())}; use the tokenizer of this model, or ignore_index for "
            "rows to leave out"
        )


@dataclass(frozen=True)
class _Settings:
    """What a loss of hidden states is computed with, beside its tensors."""

    softcap: float | None
    channel: Channel | None  # the ranks that share the vocabulary
    low: int  # the first id of this rank's rows of the weight
    rows: int  # of a chunk
    is_summed: bool
    has_backward: bool = True


class _Chunk:
    """The losses of some rows of hidden states, and then the gradient of their logits."""

    def __init__(self, logits: torch.Tensor, ids: torch.Tensor, is_counted: torch.Tensor, how: _Settings) -> None:
        self._is_counted, self._dtype = is_counted, logits.dtype
        self._local, self._elsewhere = local_ids(ids.masked_fill(~is_counted, how.low), how.low, logits.shape[1])
        values, self._slope = _capped(logits, how.softcap)
        at_ids = values.gather(-1, self._local.unsqueeze(-1)).squeeze(-1).masked_fill(self._elsewhere, 0.0)
        self._exponentials, self._factor, normalizer, sums = softmax_statistics(values, [at_ids], how.channel)
        self.losses = (normalizer - sums[0]).masked_fill(~is_counted, 0.0)

    def gradient(self, of_losses: torch.Tensor | None) -> torch.Tensor:
        """Returns the gradient of the logits, once; ``of_losses`` is that of the losses, None stands for ones."""
        weights = torch.ones_like(self._factor) if of_losses is None else of_losses
        weights = weights.masked_fill(~self._is_counted, 0.0)
        found = self._exponentials.mul_((self._factor * weights).unsqueeze(-1))
        at_ids = weights.masked_fill(self._elsewhere, 0.0).neg_().unsqueeze(-1)
        found.scatter_add_(-1, self._local.unsqueeze(-1), at_ids)
        return (found if self._slope is None else found.mul_(self._slope)).to(self._dtype)


def _capped(logits: torch.Tensor, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns logits after the softcap, at least in fp32, and its slope; the memory of fp32 logits is used again."""
    values = as_wide(logits)
    if softcap is None:
        return values, None
    tangents = values.div_(softcap).tanh_()
    return tangents * softcap, tangents.square_().neg_().add_(1.0)


def _sum_and_gradient(
    logits: torch.Tensor, ids: torch.Tensor, is_counted: torch.Tensor, how: _Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    chunk = _Chunk(logits, ids, is_counted, how)
    return chunk.losses.sum(), chunk.gradient(None)


@cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Returns :func:`_sum_and_gradient` in a few loops, which keep intermediate results out of memory."""
    return torch.compile(_sum_and_gradient, dynamic=True)


class _Losses(torch.autograd.Function):
    """The losses of rows, or their sum, without whole logits.

    The gradients of a sum are computed in forward, because each row's share of it is 1. Those of single rows are known
    in backward only, which computes the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ids: torch.Tensor,
        is_counted: torch.Tensor,
        how: _Settings,
    ) -> torch.Tensor:
        ctx.how, ctx.gradients = how, None
        if how.is_summed and how.has_backward and any(ctx.needs_input_grad):
            gradients = _Gradients(rows, weight, bias, ctx.needs_input_grad)
            of_chunk = _sum_and_gradient if how.channel is not None or rows.device.type == "cpu" else _compiled()
            total = rows.new_zeros((), dtype=as_wide(rows[:0]).dtype)
            for part in _parts(rows, how):
                loss, gradient = of_chunk(_logits(rows[part], weight, bias), ids[part], is_counted[part], how)
                total += loss
                gradients.add(gradient, part)
            ctx.gradients = gradients.finish()
            return total
        chunks = [
            _Chunk(_logits(rows[part], weight, bias), ids[part], is_counted[part], how).losses
            for part in _parts(rows, how)
        ]
        losses = torch.cat(chunks) if chunks else rows.new_zeros(0, dtype=as_wide(rows[:0]).dtype)
        if how.is_summed:
            return losses.sum()
        ctx.save_for_backward(rows, weight, bias, ids, is_counted)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        how: _Settings = ctx.how
        if how.is_summed:
            if ctx.gradients is None:
                raise RuntimeError(
                    "linear_cross_entropy: backward was called a second time, and its gradients are freed by the first "
                    'one. Add the losses before one backward, or use reduction="none"'
                )
            # In place: the gradient of a large head would be in memory twice otherwise.
            found = [None if one is None else one.mul_(gradient) for one in ctx.gradients]
            ctx.gradients = None
            return *found, None, None, None
        rows, weight, bias, ids, is_counted = ctx.saved_tensors
        gradients = _Gradients(rows, weight, bias, ctx.needs_input_grad)
        for part in _parts(rows, how):
            chunk = _Chunk(_logits(rows[part], weight, bias), ids[part], is_counted[part], how)
            gradients.add(chunk.gradient(gradient[part]), part)
        return *gradients.finish(), None, None, None


def _parts(rows: torch.Tensor, how: _Settings) -> list[slice]:
    return [slice(first, first + how.rows) for first in range(0, rows.shape[0], how.rows)]


def _logits(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())


class _Gradients:
    """Accumulates the gradients of hidden states, weight and bias over chunks, if autograd needs them."""

    def __init__(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs: tuple[bool, ...]
    ) -> None:
        self._rows, self._weight = rows, weight
        self._of_rows = torch.empty_like(rows) if needs[0] else None
        # Of many chunks: sums in 16 bits would lose what later chunks add.
        self._of_weight = torch.zeros_like(weight, dtype=as_wide(weight[:0]).dtype) if needs[1] else None
        self._of_bias = None if bias is None or not needs[2] else torch.zeros_like(bias, dtype=as_wide(bias[:0]).dtype)

    def add(self, gradient: torch.Tensor, part: slice) -> None:
        """Adds what the gradient of the logits of some rows contributes."""
        if self._of_rows is not None:
            torch.mm(gradient, self._weight, out=self._of_rows[part])
        if self._of_weight is not None and self._of_weight.dtype == gradient.dtype:
            self._of_weight.addmm_(gradient.t(), self._rows[part])
        elif self._of_weight is not None:
            self._of_weight += gradient.t() @ self._rows[part]
        if self._of_bias is not None:
            self._of_bias += gradient.sum(0, dtype=self._of_bias.dtype)

    def finish(self) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of hidden states, weight and bias; None for those that autograd does not need."""
        dtype = self._weight.dtype
        return self._of_rows, *(None if one is None else one.to(dtype) for one in (self._of_weight, self._of_bias))


@cache
def _has_liger(device: str) -> bool:
    return device != "cpu" and find_spec("liger_kernel") is not None


class _BlockLosses(torch.autograd.Function):
    """Losses of rows of logits that exist; fp32 copies and probabilities exist for one block of rows only."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, is_counted: torch.Tensor, how: _Settings
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, ids, is_counted)
        ctx.how = how
        losses = logits.new_empty(logits.shape[0], dtype=as_wide(logits[:0]).dtype)
        for part in _parts(logits, how):
            losses[part] = _Chunk(as_wide(logits[part], copy=True), ids[part], is_counted[part], how).losses
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, ids, is_counted = ctx.saved_tensors
        of_logits = torch.empty_like(logits)
        for part in _parts(logits, ctx.how):
            chunk = _Chunk(as_wide(logits[part], copy=True), ids[part], is_counted[part], ctx.how)
            of_logits[part] = chunk.gradient(gradient[part])
        return of_logits, None, None, None


class ChunkedCausalLMLoss:
    """The loss of a causal language model as Transformers calls it, without fp32 copies of all logits.

    Args:
        block_rows: Rows of logits whose fp32 values exist at once; None: as many as fit into 64 MiB.
        backend: ``"auto"`` or ``"torch"``.

    Raises:
        DeepSpeedConfigError: ``block_rows`` is no positive number, or the backend is another one.
    """

    def __init__(self, block_rows: int | None = None, backend: str = "auto") -> None:
        if block_rows is not None and block_rows < 1:
            raise DeepSpeedConfigError(
                f"ChunkedCausalLMLoss(block_rows={block_rows}): expected a number of rows from 1 on; leave it out, and "
                "it is chosen"
            )
        if backend not in ("auto", "torch"):
            raise DeepSpeedConfigError(
                f'ChunkedCausalLMLoss(backend="{backend}"): expected "auto" or "torch"; leave the argument out'
            )
        self.block_rows, self.backend = block_rows, backend

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Returns the 0-dim fp32 loss: the mean over the labels that count, or the sum by ``num_items_in_batch``.

        Args:
            logits: ``[batch, tokens, vocabulary]``.
            labels: ``[batch, tokens]``; the label of a token is the next one. Unused if ``shift_labels`` is given.
            vocab_size: The size of the vocabulary.
            ignore_index: The label that does not count.
            shift_labels: ``[batch, tokens]``, the label of each token itself.
        """
        if shift_labels is None:
            if labels is None:
                raise DeepSpeedConfigError(
                    "ChunkedCausalLMLoss: expected labels or shift_labels, found neither; pass one of them"
                )
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        flat, ids = logits.reshape(-1, vocab_size), shift_labels.reshape(-1).to(logits.device)
        is_counted = ids != ignore_index
        _refuse_unknown(ids, is_counted, vocab_size)
        rows = self.block_rows or max(2**24 // vocab_size, 1)
        losses = _BlockLosses.apply(flat, ids, is_counted, _Settings(None, None, 0, rows, is_summed=False))
        return losses.sum() / (is_counted.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


def install_chunked_causal_lm_loss(
    model: Any, block_rows: int | None = None, backend: str = "auto"
) -> ChunkedCausalLMLoss:
    """Makes a Transformers model compute its loss by a :class:`ChunkedCausalLMLoss`, and returns that."""
    loss = ChunkedCausalLMLoss(block_rows, backend)
    use_loss_function(model, loss)
    return loss
