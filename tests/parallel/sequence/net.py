"""A small causal model whose activations may be cut along the sequence, and plain torch's answer for whole ones."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from deepspeed.parallel.sequence.attention import DistributedAttention

VOCABULARY, WIDTH, TOKENS = 23, 12, 16


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention on ``[batch, tokens, heads, width]``."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, heads: int, key_heads: int, group: Any) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(WIDTH, 4 * (heads + 2 * key_heads))
        self.out = nn.Linear(4 * heads, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 17), nn.GELU(), nn.Linear(17, WIDTH))
        self.shared = None if group is None else DistributedAttention(attend, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.qkv(x)
            .view(*x.shape[:2], -1, 4)
            .split([self.heads, *[(self.qkv.out_features // 4 - self.heads) // 2] * 2], dim=2)
        )
        seen = attend(q, k, v) if self.shared is None else self.shared(q, k, v, 0)
        x = x + self.out(seen.flatten(2))
        return x + self.mlp(x)


class Net(nn.Module):
    """Logits of ``[batch, tokens]``; head and embedding are tied, the last layer of a frozen pair is frozen."""

    def __init__(self, heads: int = 4, key_heads: int = 2, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(heads)
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, key_heads, group) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.bias.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(sample: int, step: int = 0) -> dict[str, torch.Tensor]:
    """Two sequences for one data rank; more labels count in the first tokens, and in the second half of one none."""
    generator = torch.Generator().manual_seed(97 * step + sample)
    ids = torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator)
    labels = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), 1)
    hidden = torch.rand(2, TOKENS, generator=generator) < torch.linspace(0, 0.9, TOKENS)
    labels = labels.masked_fill(hidden, -100)
    labels[:, TOKENS * 3 // 4 :] = -100  # with 4 ranks the last has nothing that counts
    return {"ids": ids, "positions": torch.arange(TOKENS).expand(2, -1), "labels": labels}


def cut(whole: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """A rank's part of a batch."""
    length = TOKENS // size
    return {name: value[:, rank * length : (rank + 1) * length] for name, value in whole.items()}


def unsharded(net: Net, data: int, step: int = 0) -> torch.Tensor:
    """The mean over data ranks of the mean over the tokens that count."""
    losses = []
    for sample in range(data):
        whole = batch(sample, step)
        logits = net(whole["ids"], whole["positions"])
        losses.append(functional.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten()))
    return torch.stack(losses).mean()
