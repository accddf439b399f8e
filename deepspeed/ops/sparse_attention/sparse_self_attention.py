"""``SparseSelfAttention``: block-sparse attention with masks and relative positions, as a module."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.job.job import axis_of
from deepspeed.ops.sparse_attention.attention import attend
from deepspeed.ops.sparse_attention.bias import additive, position_bias
from deepspeed.ops.sparse_attention.plan import LayoutPlan, compile_layout
from deepspeed.ops.sparse_attention.sparsity_config import FixedSparsityConfig, SparsityConfig

_MODES = ("add", "mul")


class SparseSelfAttention(nn.Module):
    """Attention of queries, keys and values over the blocks of a pattern.

    The layout of ``max_seq_length`` tokens is the buffer ``master_layout``; shorter sequences use its upper left
    corner, longer ones a separate layout. Rank 0's layouts are broadcast to all ranks. So every rank must run the first
    forward, and the first one with each length above ``max_seq_length``.

    Args:
        key_padding_mask_mode: ``add``: the mask's values are added to the scores; ``mul``: 0 hides a key.
        attn_mask_mode: The same two modes, for the attention mask.
        max_seq_length: Tokens of the layout that is kept.
        is_causal: Whether no token attends to later ones, in addition to the pattern.
        mpu: Ignored; accepted for compatibility.

    Raises:
        ValueError: An unknown mode.
        TypeError: ``sparsity_config`` is no pattern.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
        *,
        dropout: float = 0.0,
        is_causal: bool = False,
        mpu: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(sparsity_config, SparsityConfig):
            raise TypeError(f"sparsity_config: expected a SparsityConfig, found {type(sparsity_config).__name__}")
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in _MODES:
                raise ValueError(f"{name}={mode!r}: expected 'add' or 'mul'")
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.max_seq_length = max_seq_length
        self.dropout = dropout
        self.is_causal = is_causal
        self.master_layout: torch.Tensor
        self.register_buffer("master_layout", sparsity_config.make_layout(max_seq_length))
        self._is_agreed = False
        self._longer = Layouts(sparsity_config)
        self._plans: dict[tuple[int, torch.device], LayoutPlan] = {}
        self._planned_version = -1

    def get_layout(self, length: int) -> torch.Tensor:
        """Returns the layout for ``length`` tokens.

        Every rank must make the first call, and the first one with each length above ``max_seq_length``.

        Raises:
            ValueError: ``length`` is not a multiple of the block size.
        """
        block = self.sparsity_config.block
        if length % block:
            raise ValueError(
                f"sparse attention: a sequence of {length} tokens is not a multiple of the block size {block}; pad it "
                "by SparseAttentionUtils.pad_to_block_size"
            )
        if not self._is_agreed:
            self.master_layout.copy_(same_on_all_ranks(self.master_layout))
            self._is_agreed = True
        if length > self.max_seq_length:
            return self._longer.layout(length)
        blocks = length // block
        return self.master_layout[:, :blocks, :blocks]

    def _plan(self, length: int, device: torch.device) -> LayoutPlan:
        if length > self.max_seq_length:
            return self._longer.plan(length, device)
        layout = self.get_layout(length)
        if self._planned_version != self.master_layout._version:  # another layout was loaded
            self._planned_version = self.master_layout._version
            self._plans.clear()
        key = (length, device)
        if key not in self._plans:
            self._plans[key] = compile_layout(layout, self.sparsity_config.block).to(device)
        return self._plans[key]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention; returns ``[batch, heads, length, width]``; rows that see nothing are zero.

        Args:
            query: ``[batch, heads, length, width]``, fp32, bf16 or fp16.
            key: ``[batch, heads, length, width]``, or transposed: ``[batch, heads, width, length]``.
            value: As ``query``.
            rpe: Added to the scaled scores: ``[length, length]``, ``[heads or 1, length, length]`` or ``[batch or 1,
                heads or 1, length, length]``; may require a gradient.
            key_padding_mask: ``[batch, length]``, other dimensions of 1 allowed.
            attn_mask: ``[length, length]``, other dimensions of 1 allowed.

        Raises:
            ValueError: Shapes or dtypes do not fit.
        """
        batch, heads, length, _ = query.shape
        if key.size(2) != length and key.size(3) == length:
            key = key.transpose(2, 3)
        bias = None if rpe is None else position_bias(rpe, (batch, heads, length, length), query.dtype)
        if attn_mask is not None:
            added = additive(attn_mask.reshape(length, length), self.attn_mask_mode, "attn_mask", query.dtype)
            bias = added.view(1, 1, length, length) if bias is None else bias + added
        key_bias = None
        if key_padding_mask is not None:
            mask = key_padding_mask.reshape(-1, length).expand(batch, length)
            key_bias = additive(mask, self.key_padding_mask_mode, "key_padding_mask", query.dtype)
        if heads != self.sparsity_config.num_heads:
            raise ValueError(
                f"sparse attention: the pattern is for {self.sparsity_config.num_heads} heads, the query has {heads}; "
                "give both the same number"
            )
        return attend(
            query,
            key,
            value,
            self._plan(length, query.device),
            key_bias=key_bias,
            bias=bias,
            is_causal=self.is_causal,
            dropout=self.dropout if self.training else 0.0,
        )


#: Lengths whose layouts are cached; a model that generates has a new length every few tokens.
_MOST_CACHED = 16


class Layouts:
    """A cache of one pattern's compiled layouts, by length and device.

    Args:
        seed: The seed of random blocks, so that all ranks and runs draw the same ones without communication. None:
            blocks are drawn from Python's global ``random``, and rank 0's layout is broadcast.
    """

    def __init__(self, config: SparsityConfig, seed: int | None = None) -> None:
        self.config = config
        self._seed = seed
        self._layouts: dict[int, torch.Tensor] = {}
        self._plans: dict[tuple[int, torch.device], LayoutPlan] = {}

    def layout(self, length: int) -> torch.Tensor:
        """Returns the pattern's layout for ``length`` tokens, the same on all ranks.

        Without a seed, every rank must make the first call with each length.
        """
        if length not in self._layouts:
            # Without a seed, a layout that is made again would have other blocks, and wait for all ranks again.
            if len(self._layouts) == _MOST_CACHED and self._seed is not None:
                oldest = next(iter(self._layouts))
                del self._layouts[oldest]
                self._plans = {key: plan for key, plan in self._plans.items() if key[0] != oldest}
            self._layouts[length] = self._make(length)
        return self._layouts[length]

    def plan(self, length: int, device: torch.device) -> LayoutPlan:
        """Returns the compiled layout for ``length`` tokens with its indices on ``device``."""
        layout = self.layout(length)
        key = (length, device)
        if key not in self._plans:
            self._plans[key] = compile_layout(layout, self.config.block).to(device)
        return self._plans[key]

    def _make(self, length: int) -> torch.Tensor:
        if self._seed is None:
            return same_on_all_ranks(self.config.make_layout(length))
        state = random.getstate()
        random.seed(self._seed)
        blocks = length // self.config.block
        try:  # a short sequence, such as a prompt, gets the corner of a longer one's layout
            made = self.config.make_layout(max(blocks, self.config._least_blocks) * self.config.block)
            return made[:, :blocks, :blocks]
        finally:
            random.setstate(state)


def same_on_all_ranks(layout: torch.Tensor) -> torch.Tensor:
    """Returns rank 0's layout ``[heads, blocks, blocks]``, which may have random blocks in it.

    Every rank must call it.
    """
    if not comm.is_initialized() or comm.get_world_size() == 1:
        return layout
    takes_host = "gloo" in str(comm.get_backend())
    sent = layout.to("cpu" if takes_host else get_accelerator().current_device_name())
    axis_of(None).transport("layers", device=sent.device).broadcast(sent, 0, label="a sparse layout")
    return sent.to(layout.device)


class BertSparseSelfAttention(nn.Module):
    """Queries, keys and values by three linear layers, then sparse attention.

    Args:
        config: Has ``hidden_size`` and ``num_attention_heads``.
        sparsity_config: The pattern; by default ``FixedSparsityConfig(num_heads=4)``, which needs 4 attention heads.

    Raises:
        ValueError: ``hidden_size`` is not a multiple of the heads.
    """

    def __init__(
        self, config: Any, sparsity_config: SparsityConfig | None = None, *, max_seq_length: int = 2048
    ) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        if hidden % heads:
            raise ValueError(
                f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}; "
                "choose a divisor of hidden_size"
            )
        self.num_attention_heads = heads
        self.attention_head_size = hidden // heads
        self.all_head_size = hidden
        self.query = nn.Linear(hidden, hidden)  # linear layer
        self.key = nn.Linear(hidden, hidden)  # linear layer
        self.value = nn.Linear(hidden, hidden)  # linear layer
        self.sparse_self_attention = SparseSelfAttention(
            FixedSparsityConfig(num_heads=4) if sparsity_config is None else sparsity_config,
            max_seq_length=max_seq_length,
        )

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Returns ``[batch, length, hidden]``; ``attention_mask`` ``[batch, (1, 1,) length]`` is added to scores."""
        query, key, value = (
            layer(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        output = self.sparse_self_attention(query, key, value, key_padding_mask=attention_mask)
        return output.transpose(1, 2).flatten(2)


class BertSparseSelfAttentionInTransformers(BertSparseSelfAttention):
    """Replaces the attention layer of a Transformers model: takes its further arguments, and returns a pair.

    In a decoder (``config.is_decoder``) no token attends to later ones.
    """

    def __init__(
        self, config: Any, sparsity_config: SparsityConfig | None = None, *, max_seq_length: int = 2048
    ) -> None:
        super().__init__(config, sparsity_config, max_seq_length=max_seq_length)
        self.sparse_self_attention.is_causal = bool(getattr(config, "is_decoder", False))

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Computes attention.

        ``attention_mask`` masks keys, ``[batch, 1, any, length]``: False hides, floats are added.
        """
        if attention_mask is not None:
            # The last row: in a decoder the others also hide later tokens, which is_causal does.
            attention_mask = attention_mask[:, 0, -1] if attention_mask.dim() == 4 else attention_mask
            if attention_mask.dtype == torch.bool:
                hidden = torch.zeros(attention_mask.shape, dtype=hidden_states.dtype, device=attention_mask.device)
                attention_mask = hidden.masked_fill(~attention_mask, float("-inf"))
        return super().forward(hidden_states, attention_mask), None
