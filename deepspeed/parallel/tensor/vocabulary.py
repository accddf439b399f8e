"""Embeddings that are cut over the vocabulary or the width, and the loss of cut logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from deepspeed.axes import TENSOR
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.differentiable import gather_from, reduce_from
from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.vocabulary import cut_cross_entropy
from deepspeed.parallel.tensor.linear import CutLinear, SharedInputs, column, take_part
from deepspeed.parallel.tensor.regions import SplitParts
from deepspeed.parallel.tensor.split import Split, even
from deepspeed.uncompiled import uncompiled


@dataclass
class CutEmbedding:
    """The cut of an embedding."""

    channel: Channel  # the ranks
    split: Split  # how the vocabulary, or the width, is split
    name: str  # the name of the layer, for messages
    padding_index: int | None = None  # the row without a gradient, in the whole vocabulary; None: all rows have one
    projection: CutLinear | None = None  # how a head with the same weight is cut


class _MadeFromEmbedding(nn.Embedding):
    """A cut embedding that can also be constructed from a whole one."""

    tensor_cut: CutEmbedding  # how it is cut
    _dim: ClassVar[int]

    def __init__(self, module: nn.Embedding, mp_group: Any = None, *, name: str | None = None) -> None:
        nn.Module.__init__(self)
        label = type(self).__name__ if name is None else name
        if not isinstance(module, nn.Embedding) or isinstance(module, _MadeFromEmbedding):
            raise TypeError(
                f"{label}(module): expected a torch.nn.Embedding that is whole, found {type(module).__name__}. Give it "
                "the layer that the ranks of mp_group shall share"
            )
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise DeepSpeedConfigError(
                f"{label}(module): max_norm, sparse and scale_grad_by_freq need all rows on each rank. Leave the "
                "embedding whole"
            )
        device = module.weight.device
        channel = Channel(LocalTransport()) if mp_group is None else axis_of(mp_group, TENSOR).channel(device)
        split = Split.evenly(module.weight.shape[self._dim], channel.size)
        self.weight = take_part(module.weight, self._dim, channel.rank, channel.size, label)  # type: ignore[arg-type]
        self.num_embeddings, self.embedding_dim = module.num_embeddings, module.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = module.padding_idx, None, module.norm_type
        self.scale_grad_by_freq = self.sparse = False
        projection = CutLinear(channel, SharedInputs(channel), split, label, is_gathered=True)
        self.tensor_cut = CutEmbedding(channel, split, label, module.padding_idx, projection)
        self.train(module.training)


class VocabularyEmbedding(_MadeFromEmbedding):
    """An embedding with some of the rows: ids of other ranks' rows give zeros here, and the outputs are summed.

    All ranks of the group must make it, from layers with equal values.

    Args:
        module: The whole embedding. Its weight becomes this layer's, and keeps this rank's rows.
        mp_group: Torch process group of the ranks that share it; None: this rank has it alone.
        name: The name of the layer, for messages.

    Raises:
        TypeError: ``module`` is not a whole embedding.
        DeepSpeedConfigError: It is sharded, has fewer rows than there are ranks, or options that need all rows.
    """

    _dim = 0

    @uncompiled
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps ids of the whole vocabulary, any shape, to ``(..., width)``."""
        cut = self.tensor_cut
        low, high = even(cut.split.extent, cut.channel.size, cut.channel.rank)
        _refuse_unknown(ids, cut)
        elsewhere = (ids < low) | (ids >= high)
        local = None if cut.padding_index is None else cut.padding_index - low
        padding = local if local is not None and 0 <= local < high - low else None
        rows = F.embedding((ids - low).masked_fill(elsewhere, 0), self.weight, padding)
        return reduce_from(rows.masked_fill(elsewhere.unsqueeze(-1), 0), cut.channel, f"the output of {cut.name}")

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits by the embedding's weight, for a head that is tied to it. All ranks must call it.

        ``hidden`` is ``[..., width]``, the same on all ranks; logits are ``[..., vocabulary]``, or where
        ``projection.is_gathered`` is False ``[..., vocabulary of this rank]``.
        """
        assert self.tensor_cut.projection is not None
        return column(hidden, self.weight, None, self.tensor_cut.projection)


class WidthEmbedding(_MadeFromEmbedding):
    """An embedding with some of the columns, whose outputs are gathered.

    Arguments and errors are those of :class:`VocabularyEmbedding`, with columns for rows.
    """

    _dim = 1

    @uncompiled
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps ids of any shape to ``(..., width)``."""
        cut = self.tensor_cut
        mine = F.embedding(ids, self.weight, cut.padding_index)
        return gather_from(mine, cut.channel, SplitParts(cut.split), label=f"the output of {cut.name}")


def _refuse_unknown(ids: torch.Tensor, cut: CutEmbedding) -> None:
    """Raises for ids outside the vocabulary, which would give zeros. On the host only, where it costs no wait."""
    if ids.device.type == "cpu" and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= cut.split.extent):
        raise IndexError(
            f"{cut.name}: ids lie between {int(ids.min())} and {int(ids.max())}, but the vocabulary has the ids 0 to "
            f"{cut.split.extent - 1}; use the tokenizer of this model"
        )


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    channel: Channel,
    vocabulary: int,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Computes the cross-entropy of logits that are divided over ranks by vocabulary. All of these ranks must call it.

    Arguments are those of :func:`cut_cross_entropy`, ``(..., vocabulary of this rank)`` and ``(...)``, with the size of
    the whole ``vocabulary``. Returns the loss of every row in fp32, in the shape of ``targets``; 0 for rows that are
    left out.
    """
    low, _ = even(vocabulary, channel.size, channel.rank)
    return cut_cross_entropy(logits, targets, channel, low, ignore_index)


def causal_loss(channel: Channel) -> Any:
    """Returns a causal language model's loss, as Transformers calls it, for logits that are cut over the vocabulary."""

    def loss_function(
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        targets = shift_labels.to(logits.device)
        losses = vocab_parallel_cross_entropy(logits, targets, channel, vocab_size, ignore_index)
        counted = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return losses.sum() / counted

    return loss_function
