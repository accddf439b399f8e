"""The result of a simulation: memory and traffic of one rank in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed.comm.base.codec import Codec
from deepspeed.parallel.pipe.schedule.lists import Kind as Computation
from deepspeed.plan.codes import PlannedSum
from deepspeed.plan.memory import Moment, Peak
from deepspeed.plan.step_totals import StepTotals
from deepspeed.plan.timeline.step_trace import TraceEvent
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind


@dataclass
class SimulatedStep:
    """Memory and traffic of one rank in one step.

    Attributes:
        parameters: Elements of the model's parameters, experts of all ranks included.
        trained: Elements of those that are trained.
        repeated: Elements of parameters that an earlier stage has too.
        repeated_trained: Elements of those that are trained.
        peaks: By tier, the highest sum, with the bytes of each kind in it.
        tops: By tier, device and host, the highest sum at each moment.
        kind_peaks: Most bytes of each kind, by tier.
        states: Bytes of each kind, by tier, between backward and update.
        activations: Bytes that forward keeps for backward; of a stage, the most of its chunks.
        pinned: Most bytes of locked host memory.
        file_bytes: Size of the rank's files.
        flow: Traffic and computation of the step.
        chunk_flops: Operations for one micro-batch, of each chunk of a stage and each kind of computation.
        chunk_activations: For each chunk of a stage, bytes that forward keeps for backward, received inputs included.
        members: By axis of the traffic counters, the ranks along it.
        sums: Reductions of gradients of a whole step.
        codec: Codec of gradients, or of what the optimizer exchanges instead; None: no codec.
        is_codec_fixed: The optimizer decides on the codec, not the configuration.
        may_skip: An update may be skipped.
        init_peak: Highest sum on the device while the engine was built.
        other_activations: Bytes that forward keeps with the other setting of activation checkpointing; None: not known.
        notices: Why that is not known.
        trace: What the step issued, in order: of the micro-batches that were simulated.
    """

    parameters: int
    trained: int
    peaks: dict[Tier, Peak]
    tops: dict[Tier, dict[Moment, int]]
    kind_peaks: dict[tuple[StorageKind, Tier], int]
    states: dict[tuple[StorageKind, Tier], int]
    activations: int
    pinned: int
    file_bytes: int
    flow: StepTotals
    init_peak: int
    repeated: int = 0
    repeated_trained: int = 0
    chunk_flops: dict[int, dict[Computation, int]] = field(default_factory=dict)
    chunk_activations: dict[int, int] = field(default_factory=dict)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sums: list[PlannedSum] = field(default_factory=list)
    codec: Codec | None = None
    is_codec_fixed: bool = False
    may_skip: bool = False
    other_activations: int | None = None
    notices: list[str] = field(default_factory=list)
    trace: list[TraceEvent] = field(default_factory=list, compare=False, repr=False)
