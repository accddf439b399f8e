"""Features of the engine on simulated devices between processes: ordered, bounded, and the losses of the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.plan.decoder import Decoder, DecoderShape
from deepspeed.zero.placement import Home
from deepspeed.zero.storage import StorageKind
from tests.device.support import engine_at
from tests.engine.support import inputs, rank, tower
from tests.harness import run_ranks
from tests.harness.device import simulated_rank


class _WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(tower(depth=1).first.in_features, 8)
        self.experts = MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=2, k=2, top2_2nd_expert_sampling=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, balance, _ = self.experts(self.first(x))
        return out.square().mean() + 0.01 * balance


FEATURES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "stage 1, optimizer on the host": (1, "optimizer on the host", {}),
    "stage 3, both on the host": (3, "both on the host", {}),
    "coded weights and gradients": (
        3,
        "device",
        {"zero": {"zero_quantized_weights": True, "zero_quantized_gradients": True}},
    ),
    "experts": (1, "device", {}),
    "1-bit Adam": (1, "device", {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 1}}}),
    "tensor parallelism": (1, "device", {"tensor_parallel": {"autotp_size": 2}}),
    "sequence parallelism": (1, "device", {"sequence_parallel_size": 2}),
}


# Device memory of a step, as torch's allocator counts it, is at most so many times what the engine's books say. The
# models are so small that a block's rounding to 512 bytes and activations are most of it, and a transfer keeps its
# buffers for as long as the other rank takes.
_MULTIPLE = 16
_FINGERPRINTS = 1 << 19  # bytes of the weights by which batches are compared, kept from tensor parallelism on


def _model(feature: str) -> nn.Module | None:
    torch.manual_seed(1)
    if feature in ("tensor parallelism", "sequence parallelism"):
        return Decoder(DecoderShape(layers=1, hidden=16, heads=2, vocab=32, intermediate=16))
    return _WithExperts() if feature == "experts" else None


def _batch(feature: str, number: int) -> list[torch.Tensor]:
    """Returns what the model takes: the same on ranks that share layers, this rank's tokens if they share sequences."""
    if feature not in ("tensor parallelism", "sequence parallelism"):
        return [inputs(number, rank())]
    place = rank() if feature == "sequence parallelism" else 0
    random = torch.Generator().manual_seed(10 * number + place)
    return [torch.randint(0, 32, (2, 8), generator=random) for _ in ("input_ids", "labels")]


def _losses(feature: str) -> list[float]:
    stage, home, more = FEATURES[feature]
    model = _model(feature)
    engine = engine_at(stage, home, precision="fp32", model=model, **more)
    found, memory = [], _Memory(engine)
    for number in range(5):
        memory.begin_step()
        loss = engine(*(tensor.to(engine.device) for tensor in _batch(feature, number)))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
        memory.end_step()
    if engine.device.type == "cuda":
        memory.check(feature)
    engine.destroy()
    return found


class _Memory:
    """Peaks of device memory, step by step."""

    def __init__(self, engine: Any) -> None:
        self._ledger = engine._runtime.ledger
        self._accelerator = deepspeed.get_accelerator()
        self._booked = 0
        self._allocated: list[int] = []
        self._reserved: list[int] = []

    def begin_step(self) -> None:
        self._ledger.reset_peak()
        self._accelerator.reset_peak_memory_stats()

    def end_step(self) -> None:
        self._booked = max(self._booked, sum(self._ledger.peak(kind, Home.DEVICE) for kind in StorageKind))
        self._allocated.append(self._accelerator.max_memory_allocated())
        self._reserved.append(self._accelerator.max_memory_reserved())

    def check(self, feature: str) -> None:
        """Raises where buffers grow from step to step, or beyond a multiple of what is on the books."""
        most = _MULTIPLE * self._booked + _FINGERPRINTS * (feature in ("tensor parallelism", "sequence parallelism"))
        assert 0 < max(self._allocated) <= most, (feature, self._allocated, most)
        assert self._reserved[2:] == self._reserved[1:2] * 3, (feature, self._reserved)


def _generates() -> list[float]:
    engine = deepspeed.init_inference(tower(depth=2), dtype=torch.float32, zero={"stage": 3})
    with torch.no_grad():
        return [engine(inputs(0, 0).to(deepspeed.get_accelerator().current_device_name())).item()]


def _all(on_device: bool) -> dict[str, list[float]]:
    if on_device:
        with simulated_rank():
            return _all(False)
    return {**{feature: _losses(feature) for feature in FEATURES}, "inference": _generates()}


def test_losses_are_those_of_the_cpu() -> None:
    on_device = run_ranks(_all, 2, True, backend=None, timeout=120)[0]
    on_cpu = run_ranks(_all, 2, False, timeout=120)[0]
    for feature, losses in on_cpu.items():
        torch.testing.assert_close(
            torch.tensor(on_device[feature]), torch.tensor(losses), rtol=1e-4, atol=1e-5, msg=lambda m, f=feature: f + m
        )
