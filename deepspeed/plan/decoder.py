"""A decoder-only transformer from four numbers, for planning models that are not written yet.

Shapes: B samples, S tokens, H hidden, A heads, K key-value heads, D = H / A, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from deepspeed.comm import groups
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.expert.layer import MoE
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


_TENSOR_PLAN = {
    "layers.*.attention.query": "colwise",
    "layers.*.attention.key": "colwise",
    "layers.*.attention.value": "colwise",
    "layers.*.attention.out": "rowwise",
    "layers.*.gate": "colwise",
    "layers.*.rise": "colwise",
    "layers.*.fall": "rowwise",
    "head": "colwise_gather_output",
    "end.*.head": "colwise_gather_output",
}
"""How tensor parallelism cuts the layers, as Transformers' plans say it."""


class _Attention(nn.Module):
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


class _Block(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = _Attention(shape)
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

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = _Attention(shape)
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
    return _ExpertBlock(shape) if shape.experts else _Block(shape)


class Decoder(nn.Module):
    """Embedding, blocks, head; returns the mean loss of the next token."""

    _tp_plan = _TENSOR_PLAN

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
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class _End(nn.Module):
    """The last layer of a pipeline: norm and head."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


class DecoderStage(nn.Module):
    """Some layers of a :class:`Decoder`: the embedding is its first layer, norm and head together are its last.

    Args:
        shape: Of the whole decoder.
        first: Its first layer.
        end: The layer after its last.
    """

    _tp_plan = _TENSOR_PLAN

    def __init__(self, shape: DecoderShape, first: int, end: int) -> None:
        super().__init__()
        self.is_first, self.is_last = first == 0, end == shape.layers + 2
        if self.is_first:
            self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        blocks = range(max(first, 1), min(end, shape.layers + 1))
        self.layers = nn.ModuleList(_block(shape) for _ in blocks)
        if self.is_last:
            self.end = nn.Sequential(_End(shape))  # in a row, as every layer of a pipeline is gathered as one

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """What goes to the next stage, or the loss.

        Args:
            x: (B, S) int64 on the first stage, (B, S, H) elsewhere.
            labels: (B, S) int64, on the last stage.
        """
        if self.is_first:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if not self.is_last:
            return x
        assert labels is not None
        logits = self.end(x)
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def layer_weights(shape: DecoderShape) -> list[int]:
    """Parameters of each layer that can lie on a stage of its own."""
    head_dim = shape.hidden // shape.heads
    kv = (shape.kv_heads or shape.heads) * head_dim
    attention = 2 * shape.hidden * (shape.hidden + kv) + 2 * shape.hidden
    block = attention + 3 * shape.hidden * shape.width * max(shape.experts, 1) + shape.hidden * shape.experts
    table = shape.vocab * shape.hidden
    return [table, *[block] * shape.layers, table + shape.hidden]
