"""A needle in a long text: a small model, trained on texts that ranks share, finds the one word that matters.

    deepspeed --num_gpus 2 train.py

Somewhere in a text of common words stands one rare word. At the end the model is asked which it was. No rank ever has
the whole text: each has its part, and attention exchanges tokens for heads.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import deepspeed
from deepspeed.sequence import mean_loss
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups

COMMON, RARE, QUESTION, WIDTH, HEADS = 48, 16, 64, 64, 4


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention on ``[batch, tokens, heads, width]``."""
    parts = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)


class Finder(nn.Module):
    """One layer of attention over texts of which this rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(QUESTION + 1, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, QUESTION + 1)
        self.attention: DistributedAttention | None = None

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text)
        query, key, value = self.qkv(x).view(*text.shape, 3 * HEADS, -1).chunk(3, dim=2)
        assert self.attention is not None
        return self.head(x + self.out(self.attention(query, key, value, 0).flatten(2)))


def texts(count: int, tokens: int, draws: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts and labels: only the last word, the question, has one."""
    text = torch.randint(0, COMMON, (count, tokens), generator=draws)
    needle = torch.randint(COMMON, COMMON + RARE, (count,), generator=draws)
    text[torch.arange(count), torch.randint(0, tokens - 1, (count,), generator=draws)] = needle
    text[:, -1] = QUESTION
    labels = torch.full_like(text, -100)
    labels[:, -1] = needle
    return text, labels


def main() -> None:
    """Trains, then counts the needles that are found in texts that the model has not seen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--local_rank", type=int, default=0)
    chosen = parser.parse_args()
    deepspeed.init_distributed()
    size = deepspeed.comm.get_world_size()
    torch.manual_seed(0)
    model = Finder()
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "sequence_parallel_size": size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    model.attention = DistributedAttention(attend, groups._get_sequence_parallel_group())
    rank = groups._get_sequence_parallel_rank()
    draws = torch.Generator().manual_seed(1)  # the same texts on all ranks that share them

    def mine(count: int, tokens: int) -> list[torch.Tensor]:
        return [part.chunk(size, dim=1)[rank].to(engine.device) for part in texts(count, tokens, draws)]

    for step in range(1, chosen.steps + 1):
        tokens = min(chosen.tokens, 16 * size * 2 ** (8 * (step - 1) // chosen.steps))  # short texts first
        text, labels = mine(32, tokens)
        loss = mean_loss(F.cross_entropy(engine(text).flatten(0, 1), labels.flatten(), reduction="none"), labels)
        engine.backward(loss)
        engine.step()
        if step % 25 == 0 and engine.global_rank == 0:
            print(f"step {step}, {tokens} words: loss {loss.item():.3f}")
    engine.eval()
    text, labels = mine(64, chosen.tokens)
    with torch.no_grad():
        found = (engine(text).argmax(-1) == labels).sum()
    deepspeed.comm.all_reduce(found)
    if engine.global_rank == 0:
        part = chosen.tokens // size
        print(f"needles found: {found.item()} of 64, in texts of {chosen.tokens} words of which a rank has {part}")
    engine.destroy()


if __name__ == "__main__":
    main()
