"""The models that ``zero.py`` and other benchmarks train, with their data. Needs torch only.

Legend: B micro-batch, T sequence length, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
_SEED = 1234


class Block(nn.Module):
    """One pre-norm transformer block, [B, T, C] to [B, T, C]; 12 parameters."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Applies causal attention, then the feed-forward part, both residual."""
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Decoder-only language model with learned positions and an untied head; ``forward`` returns the loss."""

    def __init__(self, *, width: int, layers: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean fp32 cross-entropy (nats per token) of ``targets`` after ``inputs``, both int64 [B, T]."""
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Chain(nn.Module):
    """Five small Linear layers in a residual chain: ten tensors, almost no arithmetic."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, C] to [B, C]."""
        for layer in self.layers:
            x = x + 0.02 * F.relu(layer(x))
        return x


class SmallTensors(nn.Module):
    """40 chains of ten tensors: 400 parameters of at most ``width`` squared elements; ``forward`` returns the loss."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Chain(width) for _ in range(40))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean squared error in fp32; ``inputs`` and ``targets`` are bf16 [B, C]."""
        x = inputs
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x.float(), targets.float())


@dataclass(frozen=True)
class Workload:
    """One model with its data and its number of ranks.

    Attributes:
        name: On the command line.
        title: In tables.
        world_size: Number of ranks.
        micro_batch: Sequences (or rows) per rank and step.
        samples: Tokens (or rows) per rank and step, for the throughput column.
        build: Returns the model in fp32 on the CPU, with the same weights on every call and rank. FSDP2 shards each of
            its ``blocks`` as a unit.
        draw: Returns the batch of a rank and a step.
    """

    name: str
    title: str
    world_size: int
    micro_batch: int
    samples: int
    build: Callable[[], nn.Module]
    draw: Callable[[int, int], Batch]


def _text(batch: int, length: int) -> Callable[[int, int], Batch]:
    """Draws sequences that follow a rule (next = 5 * this + 7 modulo 256), so that losses fall and can be compared."""

    def draw(rank: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(_SEED + 7919 * step + rank)
        tokens = torch.randint(0, 256, (batch, 1), generator=generator)
        columns = [tokens]
        for _ in range(length):
            columns.append((5 * columns[-1] + 7) % 256)
        tokens = torch.cat(columns, dim=1)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return draw


def _vectors(batch: int, width: int) -> Callable[[int, int], Batch]:
    def draw(rank: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(_SEED + 7919 * step + rank)
        inputs = torch.randn(batch, width, generator=generator)
        return inputs.bfloat16(), inputs.roll(1, dims=1).bfloat16()

    return draw


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(_SEED)
        return make()

    return build


def gpt(layers: int, ranks: int) -> Workload:
    """Returns the workload of a GPT with this depth and number of ranks."""
    return Workload(
        name=f"gpt-{layers}-{ranks}",
        title=f"GPT of {layers} layers (width 512, sequence 128, micro-batch 2), {ranks} rank(s)",
        world_size=ranks,
        micro_batch=2,
        samples=2 * 128,
        build=_seeded(lambda: GPT(width=512, layers=layers, heads=8, length=128, vocabulary=4096)),
        draw=_text(batch=2, length=128),
    )


_TITLE = "GPT, 29.5M parameters (width 512, 8 layers, sequence 128, micro-batch 2), 2 ranks"
WORKLOADS = {
    workload.name: workload
    for workload in (
        replace(gpt(8, 2), name="gpt", title=_TITLE),
        replace(gpt(8, 2), name="offload", title=f"{_TITLE}, with host offload"),
        Workload(
            name="thin",
            title="48 thin layers, 9.6M parameters (width 128, sequence 32, micro-batch 2), 1 rank",
            world_size=1,
            micro_batch=2,
            samples=2 * 32,
            build=_seeded(lambda: GPT(width=128, layers=48, heads=4, length=32, vocabulary=256)),
            draw=_text(batch=2, length=32),
        ),
        Workload(
            name="small",
            title="400 small tensors, 0.8M parameters in 40 blocks (width 64, 64 rows), 2 ranks",
            world_size=2,
            micro_batch=64,
            samples=64,
            build=_seeded(lambda: SmallTensors(width=64)),
            draw=_vectors(batch=64, width=64),
        ),
    )
}


def workload_named(name: str) -> Workload:
    """Returns one of :data:`WORKLOADS`, or a :func:`gpt` by its name ``gpt-LAYERS-RANKS``."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    _, layers, ranks = name.split("-")
    return gpt(int(layers), int(ranks))
