"""A small GPT on three axes: stages x copies x ranks that share layers. It learns to continue counting.

deepspeed --num_gpus 4 gpt.py --pipe 2 --tensor 2
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

VOCABULARY, WIDTH, HEADS, LENGTH = 64, 64, 4, 32
MICRO_BATCH, MICRO_BATCHES = 4, 4


class Embedding(nn.Module):
    """Tokens and their places; the tokens' weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.05 * torch.randn(VOCABULARY, WIDTH))
        self.places = nn.Parameter(0.05 * torch.randn(LENGTH, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Vectors of the tokens."""
        return F.embedding(tokens, self.weight) + self.places[: tokens.shape[1]]


def logits(embedding: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The head: how well every token of the vocabulary fits."""
    return F.layer_norm(hidden, (WIDTH,)) @ embedding.weight.T


class MLP(nn.Module):
    """The half of a block that a tensor axis cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Adds to the vectors."""
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Adds to the vectors."""
        split = self.qkv(self.norm(hidden)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split.unbind(0), is_causal=True)
        return hidden + self.out(mixed.transpose(1, 2).flatten(2))


def texts(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches ``(tokens, next tokens)`` without end: counting by some step."""
    random = torch.Generator().manual_seed(seed)
    while True:
        begin, step = (torch.randint(1, 8, (MICRO_BATCH, 1), generator=random) for _ in range(2))
        counted = (begin + step * torch.arange(LENGTH + 1)) % VOCABULARY
        yield counted[:, :-1], counted[:, 1:]


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next tokens."""
    return F.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipe", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()

    deepspeed.init_distributed()
    copies = torch.distributed.get_world_size() // (args.pipe * args.tensor)
    topology = PipeModelDataParallelTopology(num_pp=args.pipe, num_mp=args.tensor, num_dp=copies)
    layers = [
        TiedLayerSpec("embedding", Embedding),
        *[LayerSpec(kind) for _ in range(4) for kind in (Attention, MLP)],
        TiedLayerSpec("embedding", Embedding, forward_fn=logits),
    ]
    torch.manual_seed(1)
    model = PipelineModule(layers, topology=topology, loss_fn=loss_fn, schedule=args.schedule)
    cut = [
        {"patterns": [r".*\.up\.weight"], "partition_type": "column"},
        {"patterns": [r".*\.down\.weight"], "partition_type": "row"},
        {"patterns": [r".*\.(qkv|out)\.weight"], "partition_type": "skip"},
    ]
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
    }
    if args.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": args.tensor, "partition_config": {"layer_specs": cut}}
    engine, *_ = deepspeed.initialize(args=args, model=model, config=config)
    data = texts(seed=engine.grid.data_parallel_id)
    for step in range(1, args.steps + 1):
        loss = engine.train_batch(data)
        if step % 20 == 0 and engine.global_rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
