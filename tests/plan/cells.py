"""What planned and real runs of the same training are compared on."""

from dataclasses import dataclass
from typing import Any

import torch

import deepspeed
from deepspeed.activation_checkpointing.feature import BlockCheckpointing
from deepspeed.comm.base.counters import counted
from deepspeed.ops.flat import drop_scratch
from deepspeed.plan import DecoderShape
from deepspeed.plan.decoder import Decoder
from deepspeed.plan.memory import MemoryCount
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind

SHAPE = DecoderShape(layers=3, hidden=128, heads=4, vocab=512, kv_heads=2)
TOKENS = 64
SAMPLES = 2


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        stage: ZeRO stage.
        optimizer: Where optimizer states live.
        params: Where compute shards live.
        accumulation: Micro-batches per step.
        checkpointing: Blocks are checkpointed.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        zero: Further keys of ``zero_optimization``.
        more: Further sections.
    """

    stage: int
    optimizer: str = "none"
    params: str = "none"
    accumulation: int = 1
    checkpointing: bool = False
    precision: str = "bf16"
    zero: tuple[tuple[str, Any], ...] = ()
    more: tuple[tuple[str, Any], ...] = ()

    def config(self, folder: str) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": self.stage,
            "stage3_param_persistence_threshold": 1000,
            "stage3_prefetch_bucket_size": 300_000,
            "stage3_max_reuse_distance": 100_000,
            **dict(self.zero),
        }
        for key, device in (("offload_optimizer", self.optimizer), ("offload_param", self.params)):
            if device != "none":
                zero[key] = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
        if self.params == "nvme":
            zero["offload_param"]["buffer_size"] = 400_000
        made = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": zero,
            **dict(self.more),
        }
        if self.precision != "fp32":
            made[self.precision] = {"enabled": True}
        if self.precision == "fp16":
            made["fp16"]["initial_scale_power"] = 4  # no overflow, so the first step makes the optimizer's state
        return made


STAGES = [Cell(stage) for stage in range(4)]
OFFLOADS = [
    Cell(1, "cpu"),
    Cell(2, "cpu"),
    Cell(2, "nvme"),
    Cell(3, "cpu"),
    Cell(3, "cpu", "cpu"),
    Cell(3, "nvme", "cpu"),
    Cell(3, "nvme", "nvme"),
]


def measure(cells: list[Cell], folder: str) -> list[dict[str, Any]]:
    """Trains every cell on this rank and counts the third step."""
    return [_measure(cell, folder) for cell in cells]


def _measure(cell: Cell, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    drop_scratch(torch.device("cpu"))
    model = Decoder(SHAPE)
    if cell.checkpointing:
        BlockCheckpointing(model).on()
    count = MemoryCount("cpu")
    with count.counting():
        engine = deepspeed.initialize(model=model, config=cell.config(folder))[0]
        batch = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64)
        for _ in range(2):
            _step(engine, batch, cell.accumulation, count)
        engine.optimizer.count_state()
        memory_tracker = engine._runtime.memory_tracker
        memory_tracker.reset_peak()
        count.reset_peaks()
        with counted() as traffic:
            activations = _step(engine, batch, cell.accumulation, count)
            requested = {name: (tally.calls, tally.nbytes) for name, tally in traffic.requested.items()}
            ran = {name: (tally.calls, tally.nbytes) for name, tally in traffic.ran.items()}
        count.update_peaks()
        kinds = {(kind.name, tier.name): memory_tracker.peak(kind, tier) for kind in StorageKind for tier in Tier}
        engine.destroy()
    return {
        "kinds": {key: nbytes for key, nbytes in kinds.items() if nbytes},
        "peaks": {tier.name: count.peaks[tier].nbytes for tier in (Tier.DEVICE, Tier.HOST)},
        "peak": str(count.peaks[Tier.DEVICE]),
        "activations": activations,
        "requested": requested,
        "ran": ran,
    }


def _step(engine: Any, batch: torch.Tensor, accumulation: int, count: MemoryCount) -> int:
    most = 0
    for _ in range(accumulation):
        held = count.other(Tier.DEVICE)
        loss = engine(batch, batch)
        most = max(most, count.other(Tier.DEVICE) - held)
        engine.backward(loss)
        engine.step()
        del loss
    return most


def planned(cell: Cell, ranks: int, folder: str, rank: int | None = None) -> Any:
    """The plan of a cell."""
    return deepspeed.plan(
        SHAPE,
        cell.config(folder),
        devices_per_node=ranks,
        device="cpu",
        device_memory="8GiB",
        sequence_length=TOKENS,
        activation_checkpointing=cell.checkpointing,
        compare_checkpointing=False,
        rank=rank,
    )


def assert_true(plan: Any, real: dict[str, Any], tolerance: float = 0.05) -> None:
    """Fails unless a plan has what a real rank counted."""
    found = plan.simulated
    kinds = {(kind.name, tier.name): nbytes for (kind, tier), nbytes in found.kind_peaks.items()}
    assert kinds.keys() == real["kinds"].keys(), (kinds, real["kinds"])
    wrong = [
        f"{key}: planned {kinds[key]:,}, counted {nbytes:,}"
        for key, nbytes in real["kinds"].items()
        if abs(kinds[key] - nbytes) > tolerance * nbytes
    ]
    sums = {tier.name: found.peaks[tier].nbytes for tier in (Tier.DEVICE, Tier.HOST)}
    for name, nbytes in {**real["peaks"], "activations": real["activations"]}.items():
        mine = found.activations if name == "activations" else sums[name]
        if abs(mine - nbytes) > tolerance * max(nbytes, 1):
            wrong.append(f"{name}: planned {mine:,}, counted {nbytes:,}; {found.peaks[Tier.DEVICE]}, {real['peak']}")
    if found.flow.requested != real["requested"]:
        wrong.append(f"collectives: planned {found.flow.requested}, counted {real['requested']}")
    if found.flow.ran != real["ran"]:
        wrong.append(f"sent: planned {found.flow.ran}, counted {real['ran']}")
    assert not wrong, "\n".join(wrong)
