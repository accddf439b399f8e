"""A decoder-only transformer from four numbers, for planning models that are not written yet.

Shapes: B samples, S tokens, H hidden, A heads, K key-value heads, D = H / A, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from deepspeed.comm.job import groups
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.expert.layer import MoE
from deepspeed.parallel.pipe.spec import LayerSpec
from deepspeed.parallel.sequence.attention import DistributedAttention


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of the decoder.

    Attributes:
        layers: Blocks.
        hidden: H.
        heads: A.
        vocab: V.
        kv_heads: K; None: as many as heads.
        intermediate: F; None: two thirds of 4 H, rounded up to a multiple of 256.
        experts: Experts of each block, of which each has this F; 0: one dense feed-forward layer instead.
        experts_per_token: Of them, those that a token goes to.
        expert_ranks: Ranks that share the experts.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int | None = None
    intermediate: int | None = None
    experts: int = 0
    experts_per_token: int = 2
    expert_ranks: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "kv_heads", "intermediate"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise DeepSpeedConfigError(f"--{name.replace('_', '-')}: expected a number above 0, found {value}")
        if self.hidden % self.heads:
            raise DeepSpeedConfigError(
                f"--heads: {self.heads} does not divide --hidden {self.hidden}; choose a divisor of it"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise DeepSpeedConfigError(
                f"--kv-heads: {self.kv_heads} does not divide --heads {self.heads}; choose a divisor of it"
            )

        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise DeepSpeedConfigError(
                f"--experts-per-token: expected 1 to {self.experts}, as there are so many, found "
                f"{self.experts_per_token}"
            )

    @property
    def width(self) -> int:
        """F."""
        return self.intermediate or -(-8 * self.hidden // 3 // 256) * 256


_BLOCK_PLAN = {
    "attention.query": "colwise",
    "attention.key": "colwise",
    "attention.value": "colwise",
    "attention.out": "rowwise",
    "gate": "colwise",
    "rise": "colwise",
    "fall": "rowwise",
}
_HEAD_PLAN = {"head": "colwise_gather_output"}
"""How tensor parallelism cuts the layers, as Transformers' plans say it."""


class _DecoderAttention(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.heads, shape.kv_heads or shape.heads
        self.head_dim = shape.hidden // shape.heads
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key = nn.Linear(shape.hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(shape.hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, S, H)
        samples, tokens, _ = x.shape
        query = self.query(x).view(samples, tokens, self.num_heads, self.head_dim)
        key = self.key(x).view(samples, tokens, self.num_kv_heads, self.head_dim)
        value = self.value(x).view(samples, tokens, self.num_kv_heads, self.head_dim)
        if groups._get_sequence_parallel_world_size() > 1:
            # x has this rank's tokens; attention needs all of them, for some heads.
            mixed = DistributedAttention(_attend, groups._get_sequence_parallel_group())(query, key, value, 0)
        else:
            mixed = _attend(query, key, value)
        return self.out(mixed.reshape(samples, tokens, -1))


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # (B, S, heads, D)
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if key.shape[1] != query.shape[1]:
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class _FeedForward(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.width, bias=False)
        self.rise = nn.Linear(shape.hidden, shape.width, bias=False)
        self.fall = nn.Linear(shape.width, shape.hidden, bias=False)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.fall(functional.silu(self.gate(y)) * self.rise(y))


class _DecoderBlock(nn.Module):
    _tp_plan = _BLOCK_PLAN

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = _DecoderAttention(shape)
        self.norm = nn.RMSNorm(shape.hidden)
        self.gate = nn.Linear(shape.hidden, shape.width, bias=False)
        self.rise = nn.Linear(shape.hidden, shape.width, bias=False)
        self.fall = nn.Linear(shape.width, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.norm(x)
        return x + self.fall(functional.silu(self.gate(y)) * self.rise(y))


class _ExpertBlock(nn.Module):
    """A block whose feed-forward layer is a mixture of experts, of which no route is dropped."""

    _tp_plan = _BLOCK_PLAN

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = _DecoderAttention(shape)
        self.norm = nn.RMSNorm(shape.hidden)
        self.experts = MoE(
            shape.hidden,
            _FeedForward(shape),
            num_experts=shape.experts,
            ep_size=shape.expert_ranks,
            k=shape.experts_per_token,
            drop_tokens=False,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.experts(self.norm(x))[0]


def _block(shape: DecoderShape) -> nn.Module:
    return _ExpertBlock(shape) if shape.experts else _DecoderBlock(shape)


class Decoder(nn.Module):
    """Embedding, blocks, head; returns the mean loss of the next token."""

    _tp_plan: ClassVar = {**{f"layers.*.{name}": style for name, style in _BLOCK_PLAN.items()}, **_HEAD_PLAN}

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(_block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # both (B, S)
        """The loss.

        Args:
            input_ids: (B, S), int64.
            labels: (B, S), int64.
        """
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return token_loss(self.head(self.norm(x)), labels)


class _End(nn.Module):
    """The last layer of a pipeline: norm and head."""

    _tp_plan = _HEAD_PLAN

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of the next token.

    Args:
        logits: (B, S, V).
        labels: (B, S), int64.
    """
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def layers_of(shape: DecoderShape) -> list[LayerSpec]:
    """The decoder as a row of layers: embedding, blocks, norm and head together."""
    block = _ExpertBlock if shape.experts else _DecoderBlock
    blocks = [LayerSpec(block, shape) for _ in range(shape.layers)]
    return [LayerSpec(nn.Embedding, shape.vocab, shape.hidden), *blocks, LayerSpec(_End, shape)]
