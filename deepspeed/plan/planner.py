"""From a request to a plan: which configuration on which machines, rehearsed, and what follows from it."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepspeed.config import parse
from deepspeed.config.batch import ACCUMULATION, MICRO, TOTAL
from deepspeed.config.source import read_source
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.devices import Machine
from deepspeed.plan.models import BlockCheckpointing, ModelSource, Workload
from deepspeed.plan.rehearsal import Part, Rehearsed, heaviest_rank, rehearse
from deepspeed.plan.times import lower_bounds, travels
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

    @property
    def step_seconds(self) -> float | None:
        """Lower bound of the time of a step; None where the device's rates are not known."""
        return max(lower_bounds(self.rehearsed.flow, self.machine).values(), default=None)

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
                t.name: {"calls": t.calls, "bytes": t.nbytes, "inside_node": t.inside, "between_nodes": t.between}
                for t in travels(found.flow, machine)
            },
            "sent": {name: {"calls": calls, "bytes": nbytes} for name, (calls, nbytes) in found.flow.ran.items()},
            "flops": found.flow.flops,
            "bytes_to_host": found.flow.down,
            "bytes_to_device": found.flow.up,
            "bytes_read_from_files": found.flow.read,
            "bytes_written_to_files": found.flow.written,
            "lower_bounds_seconds": lower_bounds(found.flow, machine),
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
        from deepspeed.plan.show import plan_text

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


def read_config(source: Any) -> dict[str, Any]:
    """The configuration as a dict of its own: from a dict, a path, or base64."""
    return copy.deepcopy(dict(read_source(source).data))


def make_plan(request: Request, *, compare: bool = True) -> Plan:
    """Plans one request.

    Args:
        request: What.
        compare: Also find the activations with the other setting of checkpointing, where blocks can be checkpointed.

    Raises:
        DeepSpeedConfigError: The configuration cannot run, or the model cannot be built; the engine's own sentence.
    """
    start = time.perf_counter()
    config, notices = _with_batch(request)
    ranks = request.machine.ranks
    parsed = parse(config, dp_world_size=ranks)
    notices += parsed.notices
    assert parsed.batch is not None
    section = config.get("optimizer")
    if not isinstance(section, dict) or section.get("type") is None:
        notices.append("the configuration names no optimizer; AdamW stands for the one that the script makes")
    rehearsed_config = config
    if (config.get("zero_optimization") or {}).get("mics_hierarchical_params_gather"):
        rehearsed_config = changed(config, mics_hierarchical_params_gather=None)
        notices.append(
            "gathers in two steps (mics_hierarchical_params_gather) are planned as gathers in one: they move as many "
            "bytes, fewer of them between nodes, and need room for one part of a bucket more"
        )
    part = Part(
        config=rehearsed_config,
        accumulation_steps=parsed.batch.accumulation_steps,
        micro_batch=parsed.batch.micro_batch_size,
        sequence_length=request.sequence_length,
        ranks=ranks,
        rank=min(1, ranks - 1) if request.rank is None else request.rank,
        kind=request.kind,
        autocast=parsed.root.torch_autocast.enabled,
    )
    named = parsed.root.optimizer.type if parsed.root.optimizer is not None else None
    if named == "Muon" and request.rank is None and ranks > 1 and stage_of(config) > 0:
        part = replace(part, rank=heaviest_rank(_workload(request), part))
        notices.append(f"Muon: rank {part.rank} is planned, which orthogonalises the largest matrix")
    made, other_setting = _workload(request), None
    if compare:
        try:
            checkpointing = BlockCheckpointing(made.model)
            other_setting = checkpointing.off if request.checkpointing else checkpointing.on
        except DeepSpeedConfigError as error:
            notices.append(str(error))
    found = rehearse(made, part, other_setting)
    activations = {request.checkpointing: found.activations}
    if found.other_activations is not None:
        activations[not request.checkpointing] = found.other_activations
    notices += found.notices
    return Plan(
        request=request,
        config=config,
        micro_batch=part.micro_batch,
        accumulation_steps=part.accumulation_steps,
        rehearsed=found,
        activations=activations,
        notices=notices,
        seconds=time.perf_counter() - start,
    )


def _workload(request: Request) -> Workload:
    made = request.source.build()
    if request.checkpointing:
        BlockCheckpointing(made.model).on()
    return made


def _with_batch(request: Request) -> tuple[dict[str, Any], list[str]]:
    """The configuration with the requested micro-batch in it; the global batch stays where it is a multiple."""
    config, notices = copy.deepcopy(request.config), []
    given = {name: config.get(name) for name in (TOTAL, MICRO, ACCUMULATION)}
    numbers = {name: value for name, value in given.items() if isinstance(value, int) and not isinstance(value, bool)}
    micro = request.micro_batch
    if micro is None and TOTAL not in numbers and MICRO not in numbers:
        micro = 1
        notices.append("the configuration leaves the micro-batch open; planned with 1 sample")
    if micro is None:
        return config, notices
    config[MICRO] = micro
    total = numbers.get(TOTAL)
    if total is None:
        config.pop(TOTAL, None)
    elif total % (micro * request.machine.ranks) == 0:
        config.pop(ACCUMULATION, None)
    else:
        config.pop(TOTAL)
        notices.append(
            f"{TOTAL} {total} is no multiple of micro-batch {micro} x {request.machine.ranks} ranks, so it was left out"
        )
    return config, notices


def changed(config: Mapping[str, Any], **zero: Any) -> dict[str, Any]:
    """A copy of a configuration with other keys in ``zero_optimization``; None takes a key out."""
    made = copy.deepcopy(dict(config))
    section = dict(made.get("zero_optimization") or {})
    for name, value in zero.items():
        if value is None:
            section.pop(name, None)
        else:
            section[name] = value
    made["zero_optimization"] = section
    return made


def stage_of(config: Mapping[str, Any]) -> int:
    """The ZeRO stage of a configuration."""
    return int((config.get("zero_optimization") or {}).get("stage", 0))
