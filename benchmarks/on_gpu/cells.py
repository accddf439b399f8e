"""The trainings of several ranks on one GPU, each compared with one process of torch alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LOW = 5e-2  # largest relative difference of losses with 16-bit arithmetic or lossy codecs from those in fp32
EXACT = 1e-4  # the same in fp32, where only the order of sums differs


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        name: In tables.
        ranks: Number of processes that share the GPU.
        config: Sections of the configuration beside batch, optimizer and precision.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        model: ``llama`` or ``mixtral``, both tiny.
        stages: Pipeline stages; 1: no pipeline.
        sequence: Ranks that share a sequence.
        tensor: Ranks that share layers.
        environment: Further environment variables.
        tolerance: Largest relative difference of a loss.
        skips: Whether rank 1 leaves a layer out from the third step on, so that its gradient of that layer is zero.
        is_killed: Whether rank 1 is killed at the third step. Then the other rank must end with an error that names it.
        then_on: Ranks on which the training continues from a checkpoint after half of its steps; 0: no checkpoint.
    """

    name: str
    ranks: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    model: str = "llama"
    stages: int = 1
    sequence: int = 1
    tensor: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    tolerance: float = EXACT
    skips: bool = False
    is_killed: bool = False
    then_on: int = 0


def _zero(stage: int, **keys: Any) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": stage, **keys}
    if stage == 3:
        section["stage3_param_persistence_threshold"] = 0
    return {"zero_optimization": section}


HOST = {"device": "cpu"}
ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

CELLS = (
    *(
        Cell(f"stage {stage}, {precision}", 2, _zero(stage), precision, tolerance=EXACT if precision == "fp32" else LOW)
        for stage in range(4)
        for precision in ("fp32", "bf16", "fp16")
    ),
    Cell("stage 2, optimizer on the host", config=_zero(2, offload_optimizer=HOST)),
    Cell("stage 3, optimizer and parameters on the host", config=_zero(3, offload_optimizer=HOST, offload_param=HOST)),
    Cell("stage 3, hpZ 2", 4, _zero(3, zero_hpz_partition_size=2)),
    Cell("stage 3, MiCS 2", 4, _zero(3, mics_shard_size=2)),
    Cell(
        "stage 3, qwZ and qgZ",
        config=_zero(3, zero_quantized_weights=True, zero_quantized_gradients=True),
        tolerance=LOW,
    ),
    Cell(
        "stage 2, int8 gradients",
        config={**_zero(2), "communication_compression": {"gradients": "int8"}},
        tolerance=LOW,
    ),
    Cell("tensor 2, stage 1", config={**_zero(1), "tensor_parallel": {"autotp_size": 2}}, tensor=2),
    Cell(
        "experts 2, stage 1",
        config={**_zero(1), "expert_parallel": {"enabled": True, "autoep_size": 2}},
        model="mixtral",
    ),
    Cell(
        "experts 2, stage 3, bf16",
        config={**_zero(3), "expert_parallel": {"enabled": True, "autoep_size": 2}},
        precision="bf16",
        model="mixtral",
        tolerance=LOW,
    ),
    Cell(
        "stage 2, updates on the host before the norm",
        config=_zero(2, offload_optimizer={**HOST, "super_offload": True}),
    ),
    Cell("sequence 2 (Ulysses), stage 3", config={**_zero(3), "sequence_parallel_size": 2}, sequence=2),
    Cell(
        "sequence 2 (ring), stage 3",
        config={**_zero(3), "sequence_parallel_size": 2, "sequence_parallel": {"mode": "ring"}},
        sequence=2,
    ),
    Cell("pipeline 2, stage 1", config=_zero(1), stages=2),
    Cell("pipeline 2 x data 2, stage 1", 4, _zero(1), stages=2),
    Cell("pipeline 2 x data 2, one connection", 4, _zero(1), stages=2, environment=ONE_CONNECTION),
    Cell("stage 3, 2 ranks, then 1", config=_zero(3), then_on=1),
    Cell("stage 3, 2 ranks, then 4", config=_zero(3), then_on=4),
    Cell("rank 1 leaves a layer out", config=_zero(3), skips=True),
    Cell("rank 1 is killed", config=_zero(3), is_killed=True),
)

# The cells of a dry run: one of each kind of program.
DRY = (
    "stage 0, fp32",
    "stage 3, bf16",
    "tensor 2, stage 1",
    "sequence 2 (Ulysses), stage 3",
    "pipeline 2, stage 1",
    "stage 3, 2 ranks, then 1",
    "rank 1 is killed",
)


def cell_named(name: str) -> Cell:
    """Returns the cell; raises StopIteration if there is none."""
    return next(cell for cell in CELLS if cell.name == name)
