"""The best layouts of a decoder on a number of devices, each with its configuration and the command that starts it.

:func:`best_layouts` searches with the settings of one engine (:data:`ENGINES`): this one's, FSDP2's or Megatron's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from deepspeed.accelerator.devices import find_device
from deepspeed.config.batch import ACCUMULATION, MICRO
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.decoder import DecoderShape
from deepspeed.plan.limits import check_count
from deepspeed.plan.machine import Machine
from deepspeed.plan.prediction.layout import ParallelLayout
from deepspeed.plan.prediction.search import search_layouts
from deepspeed.plan.prediction.step import ERROR, PredictedStep, settings_that_help

ERROR_OF_EXPERTS = 0.35
"""Relative error stated for mixtures of experts: about the median on published runs (``benchmarks/scale.py``)."""
TIGHT = 0.92
"""Share of a device's memory from which a layout is marked: what the plan does not know may not fit beside it."""
_PER_NODE = 8
_TOKENS = 1 << 20  # of a step, unless the caller gives its samples
_SEARCHED = 40

_OURS = ParallelLayout(is_compiled=True, has_fused_loss=True, cuts_norms=True, summed_bytes=4)


def _as_ours(layout: ParallelLayout) -> ParallelLayout:
    return replace(layout, has_fused_loss=False) if layout.pipe > 1 else layout  # refused in pipelines


def _as_fsdp(layout: ParallelLayout) -> ParallelLayout | None:
    return layout if layout.stage == 3 and layout.tensor == layout.pipe == layout.experts == 1 else None


ENGINES: Mapping[str, tuple[ParallelLayout, Callable[[ParallelLayout], ParallelLayout | None]]] = MappingProxyType(
    {
        "ours": (_OURS, _as_ours),
        "fsdp": (ParallelLayout(is_compiled=True, is_fsdp=True), _as_fsdp),
        "megatron": (
            replace(_OURS, is_megatron=True, overlaps_gather=True, sums_in_products=True, overlaps_tensor=True),
            lambda layout: layout,
        ),
    }
)
"""By name: what is compiled, fused and overlapped, and which layouts of the search the engine has."""
_MEMORY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}),
    ("optimizer states in host memory", {"offload": True}),
    ("optimizer states and parameters in host memory", {"offload": True, "offload_parameters": True}),
)
"""What is tried in this order until something fits: words, and fields of the layout."""


@dataclass(frozen=True)
class BestLayout:
    """One of the best layouts."""

    step: PredictedStep
    near_copies: int  # layouts with the same degrees and stage that are slower
    first_change: str  # the setting that would help most; empty if none would

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one device."""
        return self.step.tokens_per_second / self.step.setup.layout.ranks

    @property
    def memory_share(self) -> float:
        """Needed bytes divided by those of a device."""
        return self.step.needed_bytes / self.step.setup.machine.device_memory

    @property
    def is_tight(self) -> bool:
        """Whether it needs more than :data:`TIGHT` of a device's memory."""
        return self.memory_share > TIGHT

    @property
    def config(self) -> dict[str, Any]:
        """The ``ds_config`` of the layout, for this engine."""
        layout = self.step.setup.layout
        zero: dict[str, Any] = {"stage": layout.stage}
        if layout.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        if layout.offload_parameters:
            zero["offload_param"] = {"device": "cpu"}
        made: dict[str, Any] = {
            MICRO: layout.micro_batch,
            ACCUMULATION: layout.accumulation,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": zero,
        }
        if layout.tensor > 1:
            made["tensor_parallel"] = {"autotp_size": layout.tensor, "sequence_parallel_norms": layout.cuts_norms}
        if layout.context > 1:
            made |= {"sequence_parallel_size": layout.context, "sequence_parallel": {"mode": "ring"}}
        if layout.experts > 1:
            made["expert_parallel"] = {"enabled": True, "autoep_size": layout.experts}
        if layout.pipe > 1:
            recomputes = {"activation_checkpoint_interval": 1} if layout.recompute != "none" else {}
            made["pipeline"] = {"schedule": layout.schedule, "num_chunks": layout.chunks, **recomputes}
        elif layout.recompute != "none":
            made["activation_checkpointing"] = {"blocks": True if layout.recompute == "full" else "selective"}
        made |= {"compile": {"enabled": True}} if layout.is_compiled else {}
        return made | ({"fused_loss": True} if layout.has_fused_loss else {})

    @property
    def command(self) -> str:
        """The command line that starts a program with this layout."""
        machine, stages = self.step.setup.machine, self.step.setup.layout.pipe
        hosts = f"--hostfile hostfile --num_nodes {machine.nodes} " if machine.nodes > 1 else ""
        note = f"  # the model as deepspeed.pipe.PipelineModule(layers, num_stages={stages})" if stages > 1 else ""
        return (
            f"deepspeed {hosts}--num_gpus {machine.devices_per_node} train.py --deepspeed_config ds_config.json{note}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns what the command prints as JSON."""
        return {
            **self.step.to_dict(),
            "tokens_per_second_and_device": self.tokens_per_second,
            "memory_share": self.memory_share,
            "is_tight": self.is_tight,
            "near_copies": self.near_copies,
            "first_change": self.first_change,
            "ds_config": self.config,
            "command": self.command,
        }


@dataclass(frozen=True)
class LayoutReport:
    """The best layouts of one engine."""

    best: tuple[BestLayout, ...]  # fastest first; each has other degrees or another stage
    offloaded: str  # what had to go to host memory for anything to fit; empty: nothing
    tried: int  # layouts considered
    samples: int  # of a step over all ranks
    error: float  # relative error of the predicted times


def machine_sizes(text: str) -> tuple[int, int, str]:
    """Returns nodes, devices per node and the device's name of ``8xh100``, ``64xh100`` or ``16x4xgb200``.

    A single number is divided into nodes of 8 devices.

    Raises:
        DeepSpeedConfigError: The text has another form, or the device is unknown.
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([a-z][a-z0-9.-]*)", text.strip().lower())
    if match is None:
        raise DeepSpeedConfigError(
            f"--gpus {text}: expected their number and name, such as 8xh100 or 64xh100, or nodes x devices x name, "
            "such as 16x4xgb200; see --list-devices"
        )
    find_device(match.group(3))
    nodes, devices = (None if part is None else int(part) for part in match.groups()[:2])
    for name, count in (("nodes", nodes), ("ranks", devices)):
        check_count(name, count, f"--gpus {text}")
    assert devices is not None, "the pattern has it"
    if nodes is not None:
        return nodes, devices, match.group(3)
    if devices <= _PER_NODE:
        return 1, devices, match.group(3)
    nodes, left = divmod(devices, _PER_NODE)
    if left:
        raise DeepSpeedConfigError(
            f"--gpus {text}: {devices:,} devices are no number of nodes of {_PER_NODE}; give nodes x devices x name"
        )
    return nodes, _PER_NODE, match.group(3)


def best_layouts(
    shape: DecoderShape,
    machine: Machine,
    tokens: int,
    samples: int | None = None,
    *,
    like: str = "ours",
    count: int = 3,
) -> LayoutReport:
    """Returns the ``count`` best layouts that differ in more than batches, chunks and recomputation.

    Args:
        tokens: Tokens of a sample.
        samples: Samples of a step over all ranks; None: about a million tokens, and a sample for each rank at least.
        like: A name in :data:`ENGINES`.

    Raises:
        DeepSpeedConfigError: Nothing fits, even in part in host memory.
    """
    base, adjust = ENGINES[like]
    if samples is None:
        samples = machine.ranks * max(1, round(_TOKENS / tokens / machine.ranks))
    refusal: DeepSpeedConfigError | None = None
    for words, fields in _MEMORY:
        try:
            found = search_layouts(
                shape, machine, tokens, samples, base=replace(base, **fields), count=_SEARCHED, adjust=adjust
            )
        except DeepSpeedConfigError as error:
            refusal = refusal or error
            continue
        steps = [each.step for each in found.best]
        copies = Counter(map(_degrees, steps))
        first = {_degrees(step): step for step in reversed(steps)}  # the fastest of each
        chosen = sorted(first.values(), key=lambda step: step.seconds)[:count]
        stated = ERROR_OF_EXPERTS if shape.experts else ERROR
        best = tuple(BestLayout(step, copies[_degrees(step)] - 1, _first_change(step)) for step in chosen)
        return LayoutReport(best, words, found.tried, samples, stated)
    assert refusal is not None, "each attempt ended in one"
    raise refusal


def _degrees(step: PredictedStep) -> tuple[int, ...]:
    layout = step.setup.layout
    return layout.tensor, layout.pipe, layout.context, layout.experts, layout.stage


def _first_change(step: PredictedStep) -> str:
    helpful = settings_that_help(step)
    least = 0.01 * step.seconds
    return f"{helpful[0][0]}: {helpful[0][1] / step.seconds:.0%} less time" if helpful and helpful[0][1] > least else ""
