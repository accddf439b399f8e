"""The self-attention layer of a BERT-like model, sparse."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention
from deepspeed.ops.sparse_attention.sparsity_config import FixedSparsityConfig, SparsityConfig


class BertSparseSelfAttention(nn.Module):
    """Queries, keys and values by three linear layers, then sparse attention.

    Args:
        config: Has ``hidden_size`` and ``num_attention_heads``.
        sparsity_config: The pattern; the fixed one of the published layer by default.
        max_seq_length: Tokens of the layout that is kept.

    Attributes:
        query: Linear layer.
        key: Linear layer.
        value: Linear layer.
        sparse_self_attention: The attention.

    Raises:
        ValueError: ``hidden_size`` is not a multiple of the heads.
    """

    def __init__(
        self, config: Any, sparsity_config: SparsityConfig | None = None, *, max_seq_length: int = 2048
    ) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        if hidden % heads:
            raise ValueError(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
        self.num_attention_heads = heads
        self.attention_head_size = hidden // heads
        self.all_head_size = hidden
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.sparse_self_attention = SparseSelfAttention(
            FixedSparsityConfig(num_heads=4) if sparsity_config is None else sparsity_config,
            max_seq_length=max_seq_length,
        )

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attends.

        Args:
            hidden_states: ``[batch, length, hidden]``.
            attention_mask: Of keys, ``[batch, length]`` or with dimensions of 1 between; added to the scores.

        Returns:
            ``[batch, length, hidden]``.
        """
        query, key, value = (
            layer(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        output = self.sparse_self_attention(query, key, value, key_padding_mask=attention_mask)
        return output.transpose(1, 2).flatten(2)


class BertSparseSelfAttentionInTransformers(BertSparseSelfAttention):
    """The same in the place of the layer of a Transformers model, which passes more and expects a pair."""

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Attends; ``attention_mask`` is one of keys, ``[batch, 1, any, length]``: False hides, floats add."""
        if attention_mask is not None:
            attention_mask = attention_mask[:, 0, 0] if attention_mask.dim() == 4 else attention_mask
            if attention_mask.dtype == torch.bool:
                hidden = torch.zeros(attention_mask.shape, dtype=hidden_states.dtype, device=attention_mask.device)
                attention_mask = hidden.masked_fill(~attention_mask, float("-inf"))
        return super().forward(hidden_states, attention_mask), None
