"""Plans as text: memory, traffic, lower bounds of time, and a verdict."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from deepspeed.accelerator.devices import in_words
from deepspeed.axes import AXES, DATA
from deepspeed.plan.configs import offloads_of, stage_of
from deepspeed.plan.pipeline import idle_shares
from deepspeed.plan.prediction.step_times import StepTimes
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind

if TYPE_CHECKING:  # ``result`` imports this module
    from deepspeed.plan.result import Plan

_ORDER = (
    StorageKind.COMPUTE,
    StorageKind.GATHERED,
    StorageKind.GRADIENT,
    StorageKind.GRADIENT_BUCKET,
    StorageKind.MASTER,
    StorageKind.OPTIMIZER,
    StorageKind.SHADOW,
    StorageKind.STAGING,
    StorageKind.PRIVATE,
)
_TIERS = {Tier.DEVICE: "device", Tier.HOST: "host", Tier.FILE: "files"}


def plan_text(plan: Plan, width: int, *, codes: bool = False) -> str:
    """Returns the plan as text, the verdict first; ``codes``: show each codec's cost, though none is configured."""
    step = plan.timed_step
    parts = [
        _headline(plan),
        _verdict(plan),
        _times(plan),
        None if not step or not step.seconds else times_table("A step is predicted to take", step),
        _memory(plan),
        _stages(plan),
        _collectives(plan),
        _codes(plan, requested=codes),
    ]
    return as_text([part for part in parts if part is not None], width)


def as_text(parts: Iterable[Table | Text], width: int) -> str:
    """Returns the tables and lines as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(Group(*parts))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in printed.splitlines()) + "\n"


def describe(plan: Plan) -> str:
    """Returns the configuration in a few words: stage, offload, micro-batch, checkpointing."""
    words = [f"ZeRO stage {stage_of(plan.config)}"]
    for name, device in zip(("optimizer", "parameters"), offloads_of(plan.config), strict=True):
        if device != "none":
            words.append(f"{name} on {device}")
    words.append(f"micro-batch {plan.micro_batch} x {plan.accumulation_steps}")
    words.append("activation checkpointing" if plan.request.checkpointing else "no activation checkpointing")
    return ", ".join(words)


def _headline(plan: Plan) -> Text:
    machine = plan.machine
    ranks = "1 rank" if machine.ranks == 1 else f"{machine.ranks:,} ranks"
    named = [f"{name} {size}" for name, size in plan.mesh.axes if size > 1]
    axes = f", {' x '.join(named)}" if any(plan.mesh.size(name) > 1 for name in AXES if name != DATA) else ""
    lines = [
        f"{plan.request.source.name}: {plan.parameters:,} parameters, {plan.trained:,} trained, sequences of "
        f"{plan.request.sequence_length:,} tokens",
        f"{ranks}: {machine.nodes:,} x {machine.devices_per_node} {machine.device.name} with "
        f"{_memory_in_words(machine.device_memory)}{axes}",
        describe(plan),
        *(f"note: {notice}" for notice in plan.notices),
    ]
    return Text("\n".join(lines) + "\n")


def _memory(plan: Plan) -> Table:
    found, machine = plan.simulated, plan.machine
    table = Table(title="Memory of one rank in a step", title_justify="left")
    for heading in ("", "where", "most of it", "when the sum is highest"):
        table.add_column(heading, justify="left" if heading in ("", "where") else "right")
    for tier in (Tier.DEVICE, Tier.HOST, Tier.FILE):
        peak = found.peaks.get(tier)
        rows = 0
        for kind in _ORDER:
            most = found.kind_peaks.get((kind, tier), 0)
            if most:
                rows += 1
                then = "" if tier is Tier.FILE or peak is None else in_words(peak.kinds.get(kind, 0))
                table.add_row(kind.value, _TIERS[tier], in_words(most), then)
        if tier is Tier.DEVICE and peak is not None:
            for checkpointed, nbytes in sorted(plan.activations.items()):
                note = "with" if checkpointed else "without"
                mine = checkpointed == plan.request.checkpointing
                table.add_row(
                    f"activations kept by forward, {note} checkpointing",
                    "device",
                    in_words(nbytes),
                    "" if mine else "(not this plan)",
                )
            table.add_row("activations and temporary tensors", "device", "", in_words(peak.other))
            table.add_row("sum", "device", "", in_words(peak.nbytes), style="bold")
        elif tier is Tier.HOST and peak is not None and peak.nbytes:
            if peak.other:
                table.add_row("further buffers", "host", "", in_words(peak.other))
            table.add_row("sum", "host", "", in_words(peak.nbytes), style="bold")
            if found.pinned:
                table.add_row("of it page-locked", "host", in_words(found.pinned), "")
        elif tier is Tier.FILE and found.file_bytes:
            table.add_row("sum", "files", in_words(found.file_bytes), "", style="bold")
        if rows and tier is not Tier.FILE:
            table.add_section()
    table.caption = (
        f"Highest on the device: {found.peaks[Tier.DEVICE].moment}. A device offers {in_words(machine.device_memory)}, "
        f"of which {machine.headroom:.0%} stay with the driver."
    )
    table.caption_justify = "left"
    return table


def _stages(plan: Plan) -> Table | None:
    pipeline = plan.request.pipeline
    if pipeline.stages == 1:
        return None
    table = Table(title=f"Stages, {pipeline.schedule}", title_justify="left")
    for heading in ("stage", "layers", "parameters", "micro-batches in flight", "their activations", "device"):
        table.add_column(heading, justify="right")
    rows = [(stage, part) for part in plan.parts for stage in part.layers]
    for stage, part in sorted(rows, key=lambda row: row[0]):
        found, layers = part.simulated, part.layers[stage]
        table.add_row(
            f"{stage + 1}",
            ", ".join(f"{first + 1} to {end}" for first, end in layers),
            f"{found.parameters:,}",
            f"{part.in_flight[stage]}",
            in_words(plan.activations_in_flight(part, stage)),
            in_words(found.peaks[Tier.DEVICE].nbytes) if part.kind.stage == stage else "less",
        )
    shares = idle_shares(pipeline.stages, plan.accumulation_steps)
    table.caption = (
        ("" if plan.idle is None else f"The busiest stage waits {plan.idle.share:.1%} of the time that it computes. ")
        + "If all stages computed equally long, they would wait "
        + ", ".join(f"{share:.1%} ({name})" for name, share in shares.items())
        + f". The memory above is that of {plan.heaviest.kind.title}."
    )
    table.caption_justify = "left"
    return table


def _collectives(plan: Plan) -> Table | None:
    rows = plan.transfers
    if not rows:
        return None
    table = Table(title="Collectives of one step, per rank", title_justify="left")
    for heading in ("", "calls", "bytes of the buffers", "inside the node, at least", "between nodes, at least"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(row.title, f"{row.calls:,}", in_words(row.nbytes), in_words(row.inside), in_words(row.between))
    return table


def _codes(plan: Plan, *, requested: bool) -> Table | None:
    """Shows the cost of gradients, plain and coded, if the caller requests it or the configuration names a codec."""
    costs, found = plan.coded_costs, plan.simulated
    section = plan.config.get("communication_compression") or {}
    if not costs or not (requested or found.codec is not None or section.get("gradients") is not None):
        return None
    table = Table(title="Gradients as codes: one rank in one step", title_justify="left")
    for heading in ("", "bits", "sent", "on the links", "codec", "together", "pays", "error feedback"):
        table.add_column(heading, justify="right" if heading else "left")
    plain = costs[0]
    for cost in costs:
        requested = found.codec is not None and cost.name == found.codec.name
        is_plain = cost is plain
        table.add_row(
            "as they are" if is_plain else f"{cost.name} (this plan)" if requested else cost.name,
            f"{cost.bits:.2f}",
            in_words(cost.nbytes),
            seconds_in_words(cost.link_seconds),
            "" if is_plain else seconds_in_words(cost.codec_seconds),
            seconds_in_words(cost.seconds),
            "" if is_plain else "yes" if cost.seconds < plain.seconds else "no",
            in_words(cost.kept) if cost.kept else "",
        )
    best = min(costs, key=lambda cost: cost.seconds)
    spared = seconds_in_words(plain.seconds - best.seconds)
    verdict = "None pays on these links." if best is plain else f"{best.name} saves most, {spared} per step."
    how = "of one core, as measured" if plan.request.kind == "cpu" else "estimated from kernels and their bytes"
    table.caption = f"{verdict} No overlap with computation is assumed. Times of codecs: {how}."
    table.caption_justify = "left"
    return table


def seconds_in_words(seconds: float) -> str:
    """Returns seconds as text with a fitting unit: ``3.124 s``, ``9.40 ms``."""
    return f"{seconds:,.3f} s" if seconds >= 0.1 else f"{1e3 * seconds:,.2f} ms"


def _times(plan: Plan) -> Table | None:
    bounds = plan.lower_bounds
    if not bounds:
        return None
    table = Table(title="A step takes at least", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, seconds in bounds.items():
        table.add_row(name, seconds_in_words(seconds))
    table.add_row("all of it at once, perfectly overlapped", seconds_in_words(max(bounds.values())), style="bold")
    if plan.tokens_per_second is not None:
        table.add_row("tokens per second of all ranks, at most", f"{plan.tokens_per_second:,.0f}")
    return table


def times_table(title: str, step: StepTimes, error: str = "") -> Table:
    """Returns the table of the parts of a step that take time, with their shares and the predicted step's error."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(justify="right")
    for name, seconds in step.rows():
        if seconds > 0:
            table.add_row(name, seconds_in_words(seconds), f"{seconds / step.seconds:.1%}")
    table.add_row("step", seconds_in_words(step.seconds), error, style="bold")
    return table


def _verdict(plan: Plan) -> Text:
    machine = plan.machine
    lines = []
    left = machine.usable - plan.device_bytes
    if left >= 0:
        lines.append(f"Device: fits, {in_words(left)} of usable memory are left.")
    else:
        lines.append(
            f"Device: DOES NOT FIT, {in_words(-left)} are missing ({in_words(plan.device_bytes)} needed during "
            f"{plan.simulated.peaks[Tier.DEVICE].moment}, {in_words(machine.usable)} usable)."
        )
    if plan.host_bytes or machine.host_memory is not None:
        offered = f" of {in_words(machine.host_memory)}" if machine.host_memory is not None else ""
        own = plan.device_bytes if plan.request.kind == "cpu" else 0  # a processor's memory is the host's
        needed = plan.host_bytes + own * machine.devices_per_node
        over = machine.host_memory is not None and needed > machine.host_memory
        lines.append(
            f"Host: {'DOES NOT FIT, ' if over else ''}{in_words(needed)}{offered} per node, for "
            f"{machine.devices_per_node} rank(s)."
        )
    if plan.nvme_bytes:
        lines.append(f"Disk: {in_words(plan.nvme_bytes)} per node.")
    if plan.better_accumulation is not None and plan.idle is not None:
        steps, idle = plan.better_accumulation
        lines.append(
            f"Pipeline: the stages wait for each other {plan.idle.share:.0%} of the time that they compute, with "
            f"{plan.accumulation_steps} micro-batch(es) per step. With gradient_accumulation_steps {steps} "
            f"(--accumulation {steps}) they wait {idle.share:.0%}."
        )
    if not plan.fits and plan.is_advised:
        lines.append(
            "What makes it fit, each planned:" if plan.suggestions else "No change that was tried makes it fit."
        )
        for change, other in plan.suggestions:
            seconds = f", a step takes at least {other.step_seconds:,.2f} s" if other.step_seconds else ""
            host = f", {in_words(other.host_bytes)} of host memory per node" if other.host_bytes else ""
            lines.append(f"  - {change}: {in_words(other.device_bytes)} on the device{host}{seconds}")
    return Text("\n".join(lines) + "\n")


def _memory_in_words(nbytes: int) -> str:
    """Returns a device's memory: in powers of ten where the caller gave it so, otherwise as drivers report it."""
    if nbytes % 10**6:
        return in_words(nbytes)
    return f"{nbytes / 1e9:,.4g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.4g} MB"
