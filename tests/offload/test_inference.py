"""ZeRO-Inference: a model larger than the device's budget generates the same tokens as an unsharded one."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.zero.storage import MemoryTracker, StorageKind, Tier
from tests.harness import on_ranks, run_ranks

WIDTH, LAYERS, VOCABULARY = 32, 6, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rise = nn.Linear(WIDTH, 4 * WIDTH)
        self.fall = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = x + self.norm(x).cumsum(dim=1) / 8
        return mixed + self.fall(torch.relu(self.rise(mixed)))


class Writer(nn.Module):
    """Predicts the next token from all before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@torch.no_grad()
def write(model: Any, count: int = 12) -> list[int]:
    """Greedy generation."""
    tokens = torch.tensor([[1, 2, 3]])
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return tokens[0].tolist()


def settings(section: dict[str, Any] | None, unit: int) -> dict[str, Any]:
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": unit,
        "stage3_max_live_parameters": 2 * unit,
        "stage3_max_reuse_distance": 0,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero | ({"offload_param": section} if section else {}),
    }


class Budget:
    """Inside, the books of no engine may pass ``nbytes`` of model states on the device."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.live = nbytes, 0

    def __enter__(self) -> None:
        MemoryTracker.observer = self

    def __exit__(self, *_error: object) -> None:
        MemoryTracker.observer = None

    def counted(self, kind: StorageKind, tier: Tier, nbytes: int) -> None:
        if tier is Tier.DEVICE:
            self.live += nbytes
            if self.live > self.nbytes:
                raise MemoryError(f"{nbytes:,} bytes of {kind.value} do not fit into {self.nbytes:,}")

    def claimed(self, tensor: torch.Tensor) -> None:
        """Nothing to count."""


def generate(section: dict[str, Any] | None) -> tuple[list[int], list[int], int, int, int, int]:
    unsharded = write(Writer().bfloat16().eval())
    whole = 2 * sum(p.numel() for p in Writer().parameters())
    unit = sum(p.numel() for p in Block().parameters()) + 1000
    # Two blocks: the one that computes and the one that is on its way.
    budget = 2 * 2 * unit + 1000
    with Budget(budget):
        engine = deepspeed.initialize(model=Writer(), config=settings(section, unit))[0]
        engine.eval()
        write(engine, 1)  # learns the order of gathers
        memory_tracker = engine._runtime.memory_tracker
        tokens = write(engine)
        peak = memory_tracker.peak(StorageKind.GATHERED) + memory_tracker.live(StorageKind.COMPUTE)
        live = memory_tracker.live_at(Tier.DEVICE)
        engine.destroy()
    return unsharded, tokens, whole, budget, peak, live


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_same_tokens_within_a_budget(ranks: int, device: str, tmp_path: Any) -> None:
    section = {"device": device}
    if device == "nvme":
        section |= {"nvme_path": str(tmp_path), "max_in_cpu": 0, "buffer_count": 3, "page_cache": False}
    for unsharded, tokens, whole, budget, peak, live in run_ranks(generate, ranks, section):
        assert tokens == unsharded and len(set(tokens)) > 3
        assert whole > 2 * budget, "the model must not fit"
        assert 0 < peak <= budget
        assert live == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_lies_in_the_page_cache_is_used_there(ranks: int, tmp_path: Any) -> None:
    section = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
    for unsharded, tokens, _, budget, peak, live in run_ranks(generate, ranks, section):
        assert tokens == unsharded
        assert peak == 0 if ranks == 1 else 0 < peak <= budget, "one rank copies nothing"
        assert live == 0
    assert not list(tmp_path.iterdir())


@on_ranks(1)
def test_without_offload_it_does_not_fit() -> None:
    section = None
    whole = 2 * sum(p.numel() for p in Writer().parameters())
    with Budget(whole // 2), pytest.raises(MemoryError, match="compute parameters"):
        deepspeed.initialize(model=Writer(), config=settings(section, 10**6))
