"""A plan: the request, the memory and traffic of one rank of the job, and derived figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from deepspeed.axes import PIPE, SAME_SAMPLES
from deepspeed.comm.job.mesh import Mesh
from deepspeed.engine.communication_compression import default_codec
from deepspeed.parallel.pipe.schedule.lists import Kind as Computation
from deepspeed.parallel.pipe.schedule.simulate import Times
from deepspeed.plan.codes import NAMES, CodedCost, coded_costs
from deepspeed.plan.kinds import RankKind
from deepspeed.plan.machine import Machine, unknown_rates
from deepspeed.plan.models import ModelSource
from deepspeed.plan.pipeline import Pipeline, PipelineBubble, idle_shares, idle_time
from deepspeed.plan.prediction.network_model import NetworkModel
from deepspeed.plan.show import plan_text
from deepspeed.plan.simulated_step import SimulatedStep
from deepspeed.plan.timeline.predicted_streams import PredictedTimeline
from deepspeed.plan.timeline.timed_step import PipelineRecording, PipelineTimes, TimedStep, time_step
from deepspeed.plan.times import (
    PlannedTransfer,
    exposed_seconds,
    lower_bounds,
    planned_transfers,
    refuse_below_bounds,
)
from deepspeed.zero.placement import Tier

MUCH_IDLE = 0.25
"""Ratio of waiting to computing from which more micro-batches are advised."""
_MOST_MICRO_BATCHES = 64  # per stage, the most that is advised


@dataclass(frozen=True)
class Request:
    """A request for a plan."""

    source: ModelSource  # builds the model
    config: dict[str, Any]  # the configuration as a dict
    machine: Machine  # the machine for the job
    sequence_length: int  # tokens of a sample
    micro_batch: int | None = None  # samples per forward and rank; None: the configuration's
    checkpointing: bool = False  # repeated blocks save only their inputs
    kind: str = "cuda"  # kind of device: ``cpu``, or one with memory of its own
    # the simulated rank; None: the one whose optimizer needs most memory, where they differ (Muon), else any but the
    # first, which has more to do while the engine is built; one of each stage
    rank: int | None = None
    pipeline: Pipeline = Pipeline()  # its stages and their schedule
    accumulation: int | None = None  # micro-batches of a step and rank; None: the configuration's


@dataclass(frozen=True)
class PlannedPart:
    """Memory and traffic of one rank, which stands for all ranks of its kind."""

    kind: RankKind
    simulated: SimulatedStep  # the counts of the simulation
    # bytes that a forward keeps for backward, by whether blocks are checkpointed; has only planned settings
    activations: dict[bool, int]
    # for each stage of this content, by chunk, the first of the model's layers that it holds and the one after its
    # last; empty without stages
    layers: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    # for each of them, the most micro-batches (of any chunk) whose activations it keeps
    in_flight: dict[int, int] = field(default_factory=dict)


@dataclass
class Plan:
    """Memory and traffic of the ranks of a job: of the one that needs most memory, and of one of each kind."""

    request: Request
    config: dict[str, Any]  # the configuration that was planned, with batch sizes as numbers
    mesh: Mesh  # the ranks of the job along their axes
    micro_batch: int  # samples per forward and rank
    accumulation_steps: int  # micro-batches per step
    parts: list[PlannedPart]  # one rank of each kind that may be the heaviest, by stage
    notices: list[str] = field(default_factory=list)  # choices that the planner made, for the table
    seconds: float = 0.0  # time that planning took
    # changes that make it fit, each with its plan; set by :meth:`take_advice`
    suggestions: list[tuple[str, Plan]] = field(default_factory=list)
    is_advised: bool = False  # whether such changes were searched for

    def take_advice(self, suggestions: list[tuple[str, Plan]]) -> None:
        """Sets the changes that ``advice.advise`` found for this plan."""
        self.suggestions, self.is_advised = suggestions, True

    @cached_property
    def heaviest(self) -> PlannedPart:
        """The rank that needs most memory on its device; the first of equal ones."""
        return max(self.parts, key=lambda part: part.simulated.peaks[Tier.DEVICE].nbytes)

    @property
    def rank(self) -> int:
        """The number of the rank that needs most memory."""
        return self.heaviest.kind.rank

    @property
    def simulated(self) -> SimulatedStep:
        """The counts of that rank's simulation."""
        return self.heaviest.simulated

    @property
    def rehearsed(self) -> SimulatedStep:
        """Returns :attr:`simulated` under its former name."""
        return self.simulated

    @property
    def activations(self) -> dict[bool, int]:
        """Bytes that a forward keeps for backward there, by whether blocks are checkpointed."""
        return self.heaviest.activations

    @property
    def machine(self) -> Machine:
        """The machine for the job."""
        return self.request.machine

    @property
    def parameters(self) -> int:
        """Elements of the model's parameters, of all stages that were planned or are like one that was."""
        return sum(
            (part.simulated.parameters - part.simulated.repeated) * max(len(part.layers), 1) for part in self.parts
        )

    @property
    def trained(self) -> int:
        """Elements of those parameters that are trained."""
        return sum(
            (part.simulated.trained - part.simulated.repeated_trained) * max(len(part.layers), 1) for part in self.parts
        )

    @property
    def device_bytes(self) -> int:
        """Highest sum on one device during a step."""
        return self.simulated.peaks[Tier.DEVICE].nbytes

    @property
    def host_bytes(self) -> int:
        """Highest sum in host memory of a node during a step, if all its ranks were of the kind that needs most."""
        most = max(part.simulated.peaks[Tier.HOST].nbytes for part in self.parts)
        return most * self.machine.devices_per_node

    @property
    def nvme_bytes(self) -> int:
        """Size of the files of all ranks of one node, if all were of the kind that needs most."""
        return max(part.simulated.file_bytes for part in self.parts) * self.machine.devices_per_node

    @property
    def fits(self) -> bool:
        """Whether device and host memory suffice."""
        return self.would_fit(self.device_bytes, self.host_bytes)

    def would_fit(self, device_bytes: int, host_bytes: int) -> bool:
        """Returns whether these sums would fit in device and host memory."""
        host = self.machine.host_memory
        if self.request.kind == "cpu":
            host_bytes += device_bytes * self.machine.devices_per_node
        return device_bytes <= self.machine.usable and (host is None or host_bytes <= host)

    @cached_property
    def transfers(self) -> list[PlannedTransfer]:
        """The collectives of a step, of the heaviest rank."""
        return self._transfers_of(self.heaviest)

    @property
    def travels(self) -> list[PlannedTransfer]:
        """Returns :attr:`transfers` under its former name."""
        return self.transfers

    @cached_property
    def _sends(self) -> list[PlannedTransfer]:
        return [moved for part in self.parts for moved in self._transfers_of(part) if moved.name == "send"]

    def _transfers_of(self, part: PlannedPart) -> list[PlannedTransfer]:
        return planned_transfers(part.simulated.flow, self.machine, self.mesh, part.kind.rank, part.simulated.members)

    @cached_property
    def coded_costs(self) -> list[CodedCost]:
        """Cost of gradients on the heaviest rank: plain, then as configured, then others; empty if none are sent."""
        found = self.simulated
        requested = [] if found.codec is None else [found.codec]
        others = [default_codec(name) for name in NAMES if not any(codec.name == name for codec in requested)]
        codecs = requested if found.is_codec_fixed else [*requested, *others]
        return coded_costs(
            found.sums, self.machine, native=self.request.kind != "cpu", may_skip=found.may_skip, codecs=codecs
        )

    @cached_property
    def idle(self) -> PipelineBubble | None:
        """How long stages wait for each other; None without stages or rates, or if not all stages were planned."""
        times = self._chunk_times
        return None if times is None else idle_time(self.request.pipeline, times, self.accumulation_steps)

    @cached_property
    def timed_step(self) -> TimedStep | None:
        """Times of a step's parts; None where the device's rates or some of the stages are not known."""
        machine, is_asynchronous = self.machine, self.request.kind != "cpu"
        if unknown_rates(machine):
            return None
        if self.request.pipeline.stages == 1:
            trace = self.simulated.trace
            step = time_step(trace, machine, self.accumulation_steps, is_asynchronous=is_asynchronous)
        elif self._pipeline_times is None:
            return None
        else:
            step = self._pipeline_times.step()
        refuse_below_bounds(step.seconds, self.lower_bounds, f"plan of {self.request.source.name}")
        return step

    @property
    def streams(self) -> PredictedTimeline | None:
        """Streams of the simulated rank, or of the first, the busiest and the last stage; None without timed_step."""
        step, micro_batches = self.timed_step, self.accumulation_steps
        if step is None:
            return None
        if self._pipeline_times is None:
            return PredictedTimeline({"": step.spans}, micro_batches, micro_batches, step.flows)
        return self._pipeline_times.streams()

    @cached_property
    def _pipeline_times(self) -> PipelineTimes | None:
        """Times of the stages; None without stages, or if some were not simulated."""
        machine, pipeline = self.machine, self.request.pipeline
        alike = {stage: part.kind.stage for part in self.parts for stage in part.layers}
        if pipeline.stages == 1 or len(alike) < pipeline.stages:
            return None
        events = {part.kind.stage: part.simulated.trace for part in self.parts}
        nbytes = max((moved.nbytes / moved.calls for moved in self._sends), default=0.0)
        along = self.mesh.group(0, PIPE)
        transfer = NetworkModel(machine).send(nbytes, along[1] - along[0])
        recording = PipelineRecording(events, alike, pipeline, transfer)
        is_asynchronous = self.request.kind != "cpu"
        return PipelineTimes(recording, machine, self.accumulation_steps, is_asynchronous=is_asynchronous)

    @cached_property
    def better_accumulation(self) -> tuple[int, PipelineBubble] | None:
        """More accumulation steps with which stages wait at most a quarter of the time, and how long they wait then.

        None if they do not wait longer now, or if it is unknown. The global batch grows too.
        """
        times, pipeline = self._chunk_times, self.request.pipeline
        if times is None or self.idle is None or self.idle.share <= MUCH_IDLE:
            return None
        steps = pipeline.stages
        while steps <= self.accumulation_steps or (idle := idle_time(pipeline, times, steps)).share > MUCH_IDLE:
            if steps > _MOST_MICRO_BATCHES * pipeline.stages:
                return None
            steps *= 2
        return steps, idle

    @cached_property
    def _chunk_times(self) -> dict[int, Times] | None:
        """The seconds of each chunk for one micro-batch, with the exchanges that its computations wait for."""
        flops, pipeline = self.machine.peak_flops, self.request.pipeline
        if pipeline.stages == 1 or flops <= 0 or sum(len(p.layers) for p in self.parts) < pipeline.stages:
            return None
        rate = self.machine.network if any(moved.between for moved in self._sends) else self.machine.device.link
        sent = max(moved.nbytes / moved.calls for moved in self._sends)
        transfer = sent / rate if rate else 0.0
        times = {}
        for part in self.parts:
            for stage in part.layers:
                chunks = [chunk for chunk, owner in enumerate(pipeline.stage_of) if owner == stage]
                for place, chunk in enumerate(chunks):
                    times[chunk] = _times(part.simulated.chunk_flops[place], flops / self._slowdown(part), transfer)
        return times

    def _slowdown(self, part: PlannedPart) -> float:
        """Returns how many times longer computations take with the exchanges that they wait for."""
        flow, machine = part.simulated.flow, self.machine
        computing = flow.flops / machine.peak_flops
        return 1 + exposed_seconds(flow, self._transfers_of(part), machine) / computing if computing else 1.0

    def activations_in_flight(self, part: PlannedPart, stage: int) -> int:
        """Returns the bytes of the activations that a stage like ``part`` keeps at once, at most."""
        schedule = self.request.pipeline.of(self.accumulation_steps)
        own = schedule.chunks_of(stage)
        most = held = 0
        for action in schedule.actions[stage]:
            change = (action.kind is Computation.FORWARD) - action.kind.gives_weight_gradient
            held += change * part.simulated.chunk_activations[own.index(action.chunk)]
            most = max(most, held)
        return most

    @cached_property
    def lower_bounds(self) -> dict[str, float]:
        """Seconds that each resource is busy in a step, on the busiest kind of rank; empty with unknown rates."""
        found: dict[str, float] = {}
        for part in self.parts:
            for name, seconds in lower_bounds(part.simulated.flow, self._transfers_of(part), self.machine).items():
                found[name] = max(found.get(name, 0.0), seconds)
        if self.idle is not None:
            found["arithmetic and the pipeline's idle time"] = self.idle.seconds
        return found

    @property
    def step_seconds(self) -> float | None:
        """Lower bound of the time of a step; None where the device's rates are not known."""
        return max(self.lower_bounds.values(), default=None)

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        samples = self.micro_batch * self.accumulation_steps * self.machine.ranks
        return samples // self.mesh.size(*SAME_SAMPLES) * self.request.sequence_length

    @property
    def tokens_per_second(self) -> float | None:
        """Upper bound of the tokens per second of all ranks; None where the device's rates are not known."""
        return self.tokens / self.step_seconds if self.step_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as a dict of numbers and strings. Bytes and seconds; device figures are per rank."""
        found, machine = self.simulated, self.machine
        return {
            "model": self.request.source.name,
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "nodes": machine.nodes,
            "devices_per_node": machine.devices_per_node,
            "device": machine.device.name,
            "device_flops": machine.device.flops,
            "device_memory": machine.device_memory,
            "usable_device_memory": machine.usable,
            "host_memory": machine.host_memory,
            "sequence_length": self.request.sequence_length,
            "micro_batch": self.micro_batch,
            "accumulation_steps": self.accumulation_steps,
            "activation_checkpointing": self.request.checkpointing,
            "fits": self.fits,
            "device_bytes": self.device_bytes,
            "host_bytes_per_node": self.host_bytes,
            "nvme_bytes_per_node": self.nvme_bytes,
            "pinned_bytes": found.pinned,
            "peak": {
                tier.value: {
                    "bytes": peak.nbytes,
                    "moment": str(peak.moment),
                    "kinds": {kind.value: nbytes for kind, nbytes in peak.kinds.items() if nbytes},
                    "activations and temporary tensors": peak.other,
                }
                for tier, peak in found.peaks.items()
                if peak.nbytes
            },
            "kinds": {f"{kind.value} ({tier.value})": nbytes for (kind, tier), nbytes in found.kind_peaks.items()},
            "activations": {"with checkpointing" if on else "without": n for on, n in self.activations.items()},
            "initialize_bytes": found.init_peak,
            "collectives": {
                t.title: {"calls": t.calls, "bytes": t.nbytes, "inside_node": t.inside, "between_nodes": t.between}
                for t in self.transfers
            },
            "sent": {name: {"calls": calls, "bytes": nbytes} for name, (calls, nbytes) in found.flow.ran.items()},
            "sent_by_axis": self._sent_by_axis(),
            "gradients": [
                {
                    "as": cost.name,
                    "bits": cost.bits,
                    "sent_bytes": cost.nbytes,
                    "link_seconds": cost.link_seconds,
                    "codec_seconds": cost.codec_seconds,
                    "error_feedback_bytes": cost.kept,
                    "pays": cost.seconds < self.coded_costs[0].seconds,
                }
                for cost in self.coded_costs
            ],
            "flops": found.flow.flops,
            "bytes_to_host": found.flow.down,
            "bytes_to_device": found.flow.up,
            "bytes_read_from_files": found.flow.read,
            "bytes_written_to_files": found.flow.written,
            "lower_bounds_seconds": self.lower_bounds,
            "step_seconds_at_least": self.step_seconds,
            "predicted": None if self.timed_step is None else self.timed_step.to_dict(),
            "tokens_per_step": self.tokens,
            "tokens_per_second_at_most": self.tokens_per_second,
            "mesh": self.mesh.sizes,
            "planned_rank": self.rank,
            **self._pipeline_dict(),
            "config": self.config,
            "notices": self.notices,
            "suggestions": [{"change": change, **_short(plan)} for change, plan in self.suggestions],
        }

    def _sent_by_axis(self) -> dict[str, int]:
        sent: dict[str, int] = {}
        for (_, axis), (_, nbytes) in self.simulated.flow.ran_along.items():
            sent[axis] = sent.get(axis, 0) + nbytes
        return sent

    def _pipeline_dict(self) -> dict[str, Any]:
        if self.request.pipeline.stages == 1:
            return {}
        stages = [
            {
                "stage": stage,
                "layers": [list(bounds) for bounds in layers],
                "parameters": part.simulated.parameters,
                "micro_batches_in_flight": part.in_flight[stage],
                "activations_in_flight": self.activations_in_flight(part, stage),
                "planned_rank": part.kind.rank if part.kind.stage == stage else None,
                "device_bytes": part.simulated.peaks[Tier.DEVICE].nbytes if part.kind.stage == stage else None,
            }
            for part in self.parts
            for stage, layers in part.layers.items()
        ]
        pipeline = self.request.pipeline
        return {
            "schedule": pipeline.schedule,
            "chunks_per_stage": len(pipeline.stage_of) // pipeline.stages,
            "stages": sorted(stages, key=lambda row: row["stage"]),
            "idle_share": None if self.idle is None else self.idle.share,
            "better_accumulation_steps": None if self.better_accumulation is None else self.better_accumulation[0],
            "idle_share_by_schedule": idle_shares(pipeline.stages, self.accumulation_steps),
        }

    def config_text(self) -> str:
        """Returns the planned configuration as JSON."""
        return json.dumps(self.config, indent=2) + "\n"

    def write_config(self, path: str | Path) -> None:
        """Writes the planned configuration as JSON."""
        Path(path).write_text(self.config_text(), encoding="utf-8")

    def table(self, width: int = 100, *, codes: bool = False) -> str:
        """Returns the plan as text; ``codes``: show the cost under each codec, though none is configured."""
        return plan_text(self, width, codes=codes)

    def __str__(self) -> str:
        return self.table()


def _times(found: Mapping[Computation, int], rate: float, transfer: float) -> Times:
    split = found.get(Computation.BACKWARD_INPUT, 0) + found.get(Computation.BACKWARD_WEIGHT, 0)
    return Times(
        found[Computation.FORWARD] / rate,
        found.get(Computation.BACKWARD, split) / rate,
        found.get(Computation.BACKWARD_WEIGHT, 0) / rate,
        transfer,
    )


def _short(plan: Plan) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "device_bytes": plan.device_bytes,
        "host_bytes_per_node": plan.host_bytes,
        "nvme_bytes_per_node": plan.nvme_bytes,
        "step_seconds_at_least": plan.step_seconds,
        "config": plan.config,
        "activation_checkpointing": plan.request.checkpointing,
    }
