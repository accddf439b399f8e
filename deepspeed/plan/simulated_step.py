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
    """Memory and traffic of one rank in one step."""

    parameters: int  # elements of the model's parameters, experts of all ranks included
    trained: int  # elements of those that are trained
    peaks: dict[Tier, Peak]  # by tier, the highest sum, with the bytes of each kind in it
    tops: dict[Tier, dict[Moment, int]]  # by tier, device and host, the highest sum at each moment
    kind_peaks: dict[tuple[StorageKind, Tier], int]  # most bytes of each kind, by tier
    states: dict[tuple[StorageKind, Tier], int]  # bytes of each kind, by tier, between backward and update
    activations: int  # bytes that forward keeps for backward; of a stage, the most of its chunks
    pinned: int  # most bytes of locked host memory
    file_bytes: int  # size of the rank's files
    flow: StepTotals  # traffic and computation of the step
    init_peak: int  # highest sum on the device while the engine was built
    repeated: int = 0  # elements of parameters that an earlier stage has too
    repeated_trained: int = 0  # elements of those that are trained
    # operations for one micro-batch, of each chunk of a stage and each kind of computation
    chunk_flops: dict[int, dict[Computation, int]] = field(default_factory=dict)
    # for each chunk of a stage, bytes that forward keeps for backward, received inputs included
    chunk_activations: dict[int, int] = field(default_factory=dict)
    # by axis of the traffic counters, the ranks along it
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sums: list[PlannedSum] = field(default_factory=list)  # reductions of gradients of a whole step
    codec: Codec | None = None  # codec of gradients, or of what the optimizer exchanges instead; None: no codec
    is_codec_fixed: bool = False  # the optimizer decides on the codec, not the configuration
    may_skip: bool = False  # an update may be skipped
    # bytes that forward keeps with the other setting of activation checkpointing; None: not known
    other_activations: int | None = None
    notices: list[str] = field(default_factory=list)  # why that is not known
    # what the step issued, in order: of the micro-batches that were simulated
    trace: list[TraceEvent] = field(default_factory=list, compare=False, repr=False)
