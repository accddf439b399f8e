"""A decoder-only transformer built from its sizes, for planning models that do not exist yet.

Shapes: B samples, S tokens, H hidden, A heads, K key-value heads, D width of a head (H / A), F feed-forward width,
V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from deepspeed.comm.job import groups
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.expert.layer import MoE
from deepspeed.parallel.pipe.spec import LayerSpec
from deepspeed.parallel.sequence.attention import DistributedAttention
from deepspeed.plan.limits import check_count

TokenLosses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From logits ``[tokens, vocabulary]`` and labels ``[tokens]`` to losses ``[tokens]``."""


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of the decoder."""

    layers: int  # blocks
    hidden: int  # h
    heads: int  # a
    vocab: int  # v
    kv_heads: int | None = None  # k; None: as many as heads
    intermediate: int | None = None  # f; None: two thirds of 4 H, rounded up to a multiple of 256
    experts: int = 0  # experts per block, each with this F; 0: one dense feed-forward layer instead
    experts_per_token: int = 2  # number of them that a token goes to
    expert_ranks: int = 1  # ranks that share the experts
    head_size: int | None = None  # d; None: H / A
    # the feed-forward layer has a gate (SwiGLU) and norms are RMSNorm; otherwise it is two layers around a GELU, and
    # norms are LayerNorm, as in GPT
    is_gated: bool = True
    # a fused kernel, which never stores scores; otherwise matrix products and a softmax
    has_fused_attention: bool = True
    # dropout probability of attention's scores (unless fused) and of what is added to the residual stream
    dropout: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "vocab", "kv_heads", "intermediate", "head_size", "experts_per_token")
        for name in sizes:
            check_count(name, getattr(self, name), f"--{name.replace('_', '-')}")
        check_count("experts", self.experts, "--experts", least=0)
        if self.head_size is None and self.hidden % self.heads:
            raise DeepSpeedConfigError(
                f"--heads: {self.heads} does not divide --hidden {self.hidden}; choose a divisor of it, or give "
                "--head-size"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise DeepSpeedConfigError(
                f"--kv-heads: {self.kv_heads} does not divide --heads {self.heads}; choose a divisor of it"
            )
        if not 0 <= self.dropout < 1:
            raise DeepSpeedConfigError(f"--dropout: expected a probability from 0 to below 1, found {self.dropout}")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise DeepSpeedConfigError(
                f"--experts-per-token: expected 1 to {self.experts}, as there are so many, found "
                f"{self.experts_per_token}"
            )

    @property
    def width(self) -> int:
        """F."""
        plain = 4 * self.hidden if not self.is_gated else -(-8 * self.hidden // 3 // 256) * 256
        return self.intermediate or plain

    @property
    def width_of_head(self) -> int:
        """D."""
        return self.head_size or self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Elements of the decoder's parameters."""
        return self.layers * self.block_parameters + 2 * self.vocab * self.hidden + self._norm

    @property
    def block_parameters(self) -> int:
        """Elements of a block, all experts included."""
        return self.attention_parameters + self.experts * self.hidden + (self.experts or 1) * self.expert_parameters

    @property
    def attention_parameters(self) -> int:
        """Elements of a block's attention and norms."""
        heads = 2 * self.heads + 2 * (self.kv_heads or self.heads)
        return heads * self.width_of_head * self.hidden + 2 * self._norm

    @property
    def expert_parameters(self) -> int:
        """Elements of one feed-forward layer."""
        return (3 if self.is_gated else 2) * self.hidden * self.width

    @property
    def _norm(self) -> int:
        return self.hidden if self.is_gated else 2 * self.hidden


_BLOCK_PLAN = {
    "attention.query": "colwise",
    "attention.key": "colwise",
    "attention.value": "colwise",
    "attention.out": "rowwise",
    "feed_forward.gate": "colwise",
    "feed_forward.rise": "colwise",
    "feed_forward.fall": "rowwise",
}
_EMBEDDING_PLAN = {"embedding": "embedding_rowwise"}
_HEAD_PLAN = {"head": "colwise_gather_output"}
"""How tensor parallelism cuts the layers, as in Transformers' plans."""


class _DecoderAttention(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.heads, shape.kv_heads or shape.heads
        self.head_dim = shape.width_of_head
        self._attend: Any = functools.partial(_attend, is_fused=shape.has_fused_attention, dropout=shape.dropout)
        self.query = nn.Linear(shape.hidden, shape.heads * self.head_dim, bias=False)
        self.key = nn.Linear(shape.hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(shape.hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * self.head_dim, shape.hidden, bias=False)

    def recompute_core_attention(self, recompute: Callable[..., Any]) -> None:
        """Wraps what is between the projections in ``recompute(function, *tensors)``, to run it again in backward."""
        self._attend = functools.partial(recompute, self._attend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, S, H)
        samples, tokens, _ = x.shape
        query = self.query(x).view(samples, tokens, self.num_heads, self.head_dim)
        key = self.key(x).view(samples, tokens, self.num_kv_heads, self.head_dim)
        value = self.value(x).view(samples, tokens, self.num_kv_heads, self.head_dim)
        if groups._get_sequence_parallel_world_size() > 1:
            # x has this rank's tokens; attention needs all of them, for some heads.
            mixed = DistributedAttention(self._attend, groups._get_sequence_parallel_group())(query, key, value, 0)
        else:
            mixed = self._attend(query, key, value)
        return self.out(mixed.reshape(samples, tokens, -1))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_fused: bool, dropout: float
) -> torch.Tensor:  # (B, S, heads, D)
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if key.shape[1] != query.shape[1]:
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
    if is_fused:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    scores = torch.softmax(query @ key.transpose(2, 3), dim=-1)  # a causal mask would not change operations or bytes
    return (functional.dropout(scores, dropout) @ value).transpose(1, 2)


class _FeedForward(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.width, bias=False) if shape.is_gated else None
        self.rise = nn.Linear(shape.hidden, shape.width, bias=False)
        self.fall = nn.Linear(shape.width, shape.hidden, bias=False)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.fall(functional.gelu(self.rise(y)))
        return self.fall(functional.silu(self.gate(y)) * self.rise(y))


def _norm(shape: DecoderShape) -> nn.Module:
    return nn.RMSNorm(shape.hidden) if shape.is_gated else nn.LayerNorm(shape.hidden)


class _DecoderBlock(nn.Module):
    _tp_plan = _BLOCK_PLAN

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = _DecoderAttention(shape)
        self.norm = _norm(shape)
        self.feed_forward = _FeedForward(shape)
        self._dropout = shape.dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + functional.dropout(self.attention(self.attention_norm(x)), self._dropout)
        return x + functional.dropout(self.feed_forward(self.norm(x)), self._dropout)


class _ExpertBlock(nn.Module):
    """A block whose feed-forward layer is a mixture of experts, without a capacity limit."""

    _tp_plan = _BLOCK_PLAN

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = _DecoderAttention(shape)
        self.norm = _norm(shape)
        self.experts = MoE(
            shape.hidden,
            _FeedForward(shape),
            num_experts=shape.experts,
            ep_size=shape.expert_ranks,
            k=shape.experts_per_token,
            drop_tokens=False,
        )
        self._dropout = shape.dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + functional.dropout(self.attention(self.attention_norm(x)), self._dropout)
        return x + functional.dropout(self.experts(self.norm(x))[0], self._dropout)


class Decoder(nn.Module):
    """Embedding, blocks, head; returns the mean loss of the next token."""

    _tp_plan: ClassVar = {
        **_EMBEDDING_PLAN,
        **{f"layers.*.{name}": style for name, style in _BLOCK_PLAN.items()},
        **_HEAD_PLAN,
    }

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        block = _ExpertBlock if shape.experts else _DecoderBlock
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self._losses: TokenLosses | None = None

    def get_output_embeddings(self) -> nn.Module:
        """Returns the layer that makes logits."""
        return self.head

    def use_token_losses(self, losses: TokenLosses) -> bool:
        """Computes the loss of each token by ``losses`` from now on, for logits of which ranks have parts."""
        self._losses = losses
        return True

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # both (B, S)
        """Returns the loss, 0-dim; ``input_ids`` and ``labels`` are ``[B, S]``, int64."""
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return token_loss(self.head(self.norm(x)), labels, losses=self._losses)


class _FirstLayer(nn.Module):
    _tp_plan = _EMBEDDING_PLAN
    _tp_plan_is_part = True

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(input_ids)


class _LastLayers(nn.Module):
    _tp_plan = _HEAD_PLAN
    _tp_plan_is_part = True

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def token_loss(logits: torch.Tensor, labels: torch.Tensor, *, losses: TokenLosses | None = None) -> torch.Tensor:
    """Returns the mean cross entropy, 0-dim, of ``[B, S, V]`` logits; ``losses`` takes logits in parts."""
    if losses is not None:
        return losses(logits.flatten(0, 1), labels.flatten()).mean()
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def layers_of(shape: DecoderShape) -> list[LayerSpec]:
    """Returns the decoder as a list of layers: embedding, blocks, and last the norm with the head."""
    block = _ExpertBlock if shape.experts else _DecoderBlock
    blocks = [LayerSpec(block, shape) for _ in range(shape.layers)]
    return [LayerSpec(_FirstLayer, shape), *blocks, LayerSpec(_LastLayers, shape)]
