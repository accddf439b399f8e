"""A plan: what was asked, what one rank of the job will hold and move, and what follows from it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from deepspeed.comm.mesh import Mesh
from deepspeed.plan.devices import Machine
from deepspeed.plan.models import ModelSource
from deepspeed.plan.rehearsal import Rehearsed
from deepspeed.plan.show import plan_text
from deepspeed.plan.times import Travel, lower_bounds, travels
from deepspeed.zero.placement import Home


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        source: Makes the model.
        config: The configuration as a dict.
        machine: Where it shall run.
        sequence_length: Tokens of a sample.
        micro_batch: Samples per forward and rank; None: the configuration's.
        checkpointing: Repeated blocks keep their inputs only.
        kind: Kind of device: ``cpu``, or one with memory of its own.
        rank: The rank that is played; None: the one whose optimizer needs most memory, where they differ (Muon), else
            any but the first, which has more to do while the engine is built.
    """

    source: ModelSource
    config: dict[str, Any]
    machine: Machine
    sequence_length: int
    micro_batch: int | None = None
    checkpointing: bool = False
    kind: str = "cuda"
    rank: int | None = None


@dataclass
class Plan:
    """What one rank of the job will hold and move.

    Attributes:
        request: What was asked.
        config: The configuration that was planned, batch sizes in numbers.
        mesh: The ranks of the job along their axes.
        rank: The one that was played.
        micro_batch: Samples per forward and rank.
        accumulation_steps: Micro-batches per step.
        rehearsed: What was counted.
        activations: Bytes that forward keeps for backward, by whether blocks are checkpointed; what was not planned is
            missing.
        notices: What the planner or the configuration had to decide.
        seconds: Time that planning took.
        suggestions: Changes that make it fit, each planned; filled in by ``advice``.
    """

    request: Request
    config: dict[str, Any]
    mesh: Mesh
    rank: int
    micro_batch: int
    accumulation_steps: int
    rehearsed: Rehearsed
    activations: dict[bool, int]
    notices: list[str] = field(default_factory=list)
    seconds: float = 0.0
    suggestions: list[tuple[str, Plan]] = field(default_factory=list)

    @property
    def machine(self) -> Machine:
        """Where it shall run."""
        return self.request.machine

    @property
    def device_bytes(self) -> int:
        """Highest sum on one device during a step."""
        return self.rehearsed.peaks[Home.DEVICE].nbytes

    @property
    def host_bytes(self) -> int:
        """Highest sum in host memory during a step, of all ranks of one node."""
        return self.rehearsed.peaks[Home.HOST].nbytes * self.machine.devices_per_node

    @property
    def nvme_bytes(self) -> int:
        """Size of the files of all ranks of one node."""
        return self.rehearsed.file_bytes * self.machine.devices_per_node

    @property
    def fits(self) -> bool:
        """Whether device and host memory suffice."""
        host = self.machine.host_memory
        needed_on_host = self.host_bytes
        if self.request.kind == "cpu":
            needed_on_host += self.device_bytes * self.machine.devices_per_node
        return self.device_bytes <= self.machine.usable and (host is None or needed_on_host <= host)

    @cached_property
    def travels(self) -> list[Travel]:
        """The collectives of a step."""
        return travels(self.rehearsed.flow, self.machine, self.mesh, self.rank)

    @property
    def lower_bounds(self) -> dict[str, float]:
        """Seconds that each resource is busy in a step, at least; empty where the device's rates are not known."""
        return lower_bounds(self.rehearsed.flow, self.travels, self.machine)

    @property
    def step_seconds(self) -> float | None:
        """Lower bound of the time of a step; None where the device's rates are not known."""
        return max(self.lower_bounds.values(), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything in numbers and strings, for programs. Bytes and seconds; device figures are per rank."""
        found, machine = self.rehearsed, self.machine
        return {
            "model": self.request.source.name,
            "parameters": found.parameters,
            "trained_parameters": found.trained,
            "nodes": machine.nodes,
            "devices_per_node": machine.devices_per_node,
            "device": machine.device.name,
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
                home.value: {
                    "bytes": peak.nbytes,
                    "moment": str(peak.moment),
                    "kinds": {kind.value: nbytes for kind, nbytes in peak.kinds.items() if nbytes},
                    "activations and temporary tensors": peak.other,
                }
                for home, peak in found.peaks.items()
                if peak.nbytes
            },
            "kinds": {f"{kind.value} ({home.value})": nbytes for (kind, home), nbytes in found.kind_peaks.items()},
            "activations": {"with checkpointing" if on else "without": n for on, n in self.activations.items()},
            "initialize_bytes": found.init_peak,
            "collectives": {
                t.title: {"calls": t.calls, "bytes": t.nbytes, "inside_node": t.inside, "between_nodes": t.between}
                for t in self.travels
            },
            "sent": {name: {"calls": calls, "bytes": nbytes} for name, (calls, nbytes) in found.flow.ran.items()},
            "flops": found.flow.flops,
            "bytes_to_host": found.flow.down,
            "bytes_to_device": found.flow.up,
            "bytes_read_from_files": found.flow.read,
            "bytes_written_to_files": found.flow.written,
            "lower_bounds_seconds": self.lower_bounds,
            "step_seconds_at_least": self.step_seconds,
            "config": self.config,
            "notices": self.notices,
            "suggestions": [{"change": change, **_short(plan)} for change, plan in self.suggestions],
        }

    def config_text(self) -> str:
        """The planned configuration as JSON."""
        return json.dumps(self.config, indent=2) + "\n"

    def write_config(self, path: str | Path) -> None:
        """Writes the planned configuration as JSON."""
        Path(path).write_text(self.config_text(), encoding="utf-8")

    def table(self, width: int = 100) -> str:
        """What people read."""
        return plan_text(self, width)

    def __str__(self) -> str:
        return self.table()


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
