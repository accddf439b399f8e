"""A small model made smaller: trained whole, then with rounded weights and fewer rows and heads, then stored in codes.

    deepspeed --num_gpus 2 train.py

A transformer reads twelve words and predicts whether the first of them comes again. It is trained as it is; then
training goes on under `compression_training` of ds_config.json; at the end `redundancy_clean` takes the pruned parts
out and stores the weights in 8 bits. Printed at each stage: how often it is right, and how large it is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import deepspeed
from deepspeed.compression import init_compression, redundancy_clean

WORDS, LENGTH, WIDTH, HEADS = 24, 12, 64, 4


class Block(nn.Module):
    """Attention whose heads may become fewer, and two linear layers between which rows may."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        # -1: as many heads as are left.
        parts = [
            layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        x = x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Reader(nn.Module):
    """Predicts whether the first word comes again."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.answer = nn.Linear(WIDTH, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places
        for block in self.blocks:
            x = block(x)
        return self.answer(x[:, 0])


def texts(count: int, dice: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Half of them with the first word again."""
    words = torch.randint(WORDS - 1, (count, LENGTH), generator=dice)
    words[:, 1:] += words[:, 1:] >= words[:, :1]  # any word but the first
    again = torch.randint(2, (count,), generator=dice)
    where = torch.randint(1, LENGTH, (count,), generator=dice)
    words[torch.arange(count), where] = torch.where(again == 1, words[:, 0], words[torch.arange(count), where])
    return words, again


def train(model: nn.Module, config: dict[str, Any], steps: int) -> Any:
    """Trains under the engine, each rank on texts of its own."""
    engine, *_ = deepspeed.initialize(model=model, config=config)
    dice = torch.Generator().manual_seed(engine.global_rank)
    for _ in range(steps):
        words, again = texts(engine.train_micro_batch_size_per_gpu(), dice)
        engine.backward(F.cross_entropy(engine(words.to(engine.device)), again.to(engine.device)))
        engine.step()
    return engine


@torch.no_grad()
def show(what: str, model: nn.Module, is_first: bool) -> None:
    """How often the model is right, and its size."""
    words, again = texts(1000, torch.Generator().manual_seed(99))
    device = next(model.parameters()).device
    right = (model.eval()(words.to(device)).argmax(1).cpu() == again).float().mean()
    size = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    if is_first:
        print(f"{what}: right in {right:.1%}, {size / 1e3:.0f} KB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--local_rank", type=int, default=-1)
    steps = parser.parse_args().steps
    config = json.loads((Path(__file__).parent / "ds_config.json").read_text())
    section = config.pop("compression_training")
    torch.manual_seed(0)
    model = Reader()

    engine = train(model, config, steps)
    show("whole", model, engine.global_rank == 0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    engine.destroy()

    config["compression_training"] = section
    model = Reader()
    model.load_state_dict(state)
    engine = train(init_compression(model, config), config, steps)
    show("compressed", model, engine.global_rank == 0)
    show("clean", redundancy_clean(engine, config), engine.global_rank == 0)
    engine.destroy()


if __name__ == "__main__":
    main()
