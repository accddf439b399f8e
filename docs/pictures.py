"""``python docs/pictures.py``: draws the pictures of the pages from the code that they are about."""

from __future__ import annotations

from pathlib import Path

from deepspeed.axes import DATA, PIPE, SEQUENCE, TENSOR
from deepspeed.comm.job.mesh import Mesh
from deepspeed.parallel.pipe.schedule import TRAIN_SCHEDULES, make_schedule
from deepspeed.parallel.pipe.schedule.simulate import Times, simulate
from deepspeed.parallel.pipe.show import svg, title
from deepspeed.zero.placement import Placement, Tier

RANKS = 4
WIDTHS = {"parameters": 2, "gradients": 4, "masters": 4, "optimizer state": 8}  # bytes per parameter: bf16 and Adam
COLORS = {"parameters": "#5b8cc9", "gradients": "#f58518", "masters": "#54a24b", "optimizer state": "#b279a2"}
OPACITY = {Tier.DEVICE: 1.0, Tier.HOST: 0.5, Tier.FILE: 0.2}
SCALE, GAP, BAR, ROW = 23, 5, 20, 52  # pixels: per byte, between bars, height of a bar, of a row with its label
TOP = 88  # of the first row

# As a part of a page of the site it takes the page's colors, as a picture by itself those of the reader's system.
STYLE = """\
.picture { --ink: var(--md-typeset-color, #222); --line: var(--md-default-fg-color--lighter, #aaa); }
@media (prefers-color-scheme: dark) {
  .picture { --ink: var(--md-typeset-color, #ddd); --line: var(--md-default-fg-color--lighter, #777); }
}
.picture text { fill: var(--ink); }
.picture .whole { fill: none; stroke: var(--line); }"""

HOST, FILE = Tier.HOST, Tier.FILE
PLACEMENTS = [
    *((f"stage {stage}", Placement.of_stage(stage)) for stage in range(4)),
    ("stage 3, optimizer on the host", Placement.of_stage(3, master_tier=HOST)),
    ("stage 3, all on the host", Placement.of_stage(3, master_tier=HOST, param_tier=HOST)),
    ("stage 3, all on NVMe", Placement.of_stage(3, master_tier=FILE, param_tier=FILE)),
]


def kept(placement: Placement) -> dict[str, tuple[bool, Tier]]:
    """For each model state: is it only a slice, and where."""
    gradient_tier = Tier.DEVICE if placement.master_tier is Tier.DEVICE else Tier.HOST
    return {
        "parameters": (placement.shard_params, placement.param_tier),
        "gradients": (placement.shard_gradients, gradient_tier),
        "masters": (placement.shard_master, placement.master_tier),
        "optimizer state": (placement.shard_master, placement.master_tier),
    }


def bytes_in(placement: Placement) -> str:
    """Bytes per parameter on one rank, by memory, in words."""
    sums = dict.fromkeys(Tier, 0.0)
    for state, (is_slice, tier) in kept(placement).items():
        sums[tier] += WIDTHS[state] / (RANKS if is_slice else 1)
    words = {Tier.DEVICE: "device", Tier.HOST: "host", Tier.FILE: "files"}
    return ", ".join(f"{words[tier]} {sums[tier]:g}" for tier in Tier if sums[tier])


def draw() -> str:
    """Who keeps what: a row per placement, in it a bar per model state, filled as far as rank 0 keeps it."""
    width = sum(WIDTHS.values()) * SCALE + (len(WIDTHS) - 1) * GAP + 2
    height = TOP + len(PLACEMENTS) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {width} {height}" width="{width + 60}" '
        'font-family="sans-serif" font-size="14">',
        f"<style>\n{STYLE}\n</style>",
        f'<text x="1" y="15">Bytes per parameter on rank 0 of {RANKS} (bf16, Adam)</text>',
    ]
    for number, (state, size) in enumerate(WIDTHS.items()):
        left, top = 1 + number % 2 * width // 2, 26 + number // 2 * 20
        parts.append(f'<rect x="{left}" y="{top}" width="12" height="12" fill="{COLORS[state]}"/>')
        parts.append(f'<text x="{left + 18}" y="{top + 11}">{state}: {size}</text>')
    parts.append('<text x="1" y="79">full color: device, half: host, faint: files</text>')
    for number, (name, placement) in enumerate(PLACEMENTS):
        top, left = TOP + number * ROW, 1
        parts.append(f'<text x="1" y="{top + 18}" font-weight="bold">{name}</text>')
        parts.append(f'<text x="{width - 1}" y="{top + 18}" text-anchor="end">{bytes_in(placement)}</text>')
        for state, (is_slice, tier) in kept(placement).items():
            full = WIDTHS[state] * SCALE
            filled = full / RANKS if is_slice else full
            share = f"1/{RANKS}" if is_slice else "whole"
            place = f'x="{left}" y="{top + 24}" height="{BAR}"'
            parts.append(
                f'<rect class="whole" {place} width="{full}"/>'
                f'<rect {place} width="{filled:g}" fill="{COLORS[state]}" fill-opacity="{OPACITY[tier]}">'
                f"<title>{name}: {state}, {share}, {tier.value}</title></rect>"
            )
            left += full + GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_timelines() -> str:
    """What four stages do with eight micro-batches, by schedule."""
    times = Times(forward=40, backward=80, weight=40)
    schedules = [make_schedule(name, 4, 8) for name in TRAIN_SCHEDULES]
    simulated = [(schedule, simulate(schedule, times)) for schedule in schedules]
    return svg([(title(*pair), *pair) for pair in simulated])


def draw_mesh() -> str:
    """Which part of the model and of the batch each of 16 ranks has, on a mesh of four axes."""
    mesh = Mesh(((PIPE, 2), (DATA, 2), (SEQUENCE, 2), (TENSOR, 2)))
    columns, cell, wide, high = 8, 26, 78, 150
    above = {"model": ("layers", PIPE, "width", TENSOR), "batch": ("samples", DATA, "tokens", SEQUENCE)}
    colors = {"model": COLORS["parameters"], "batch": COLORS["gradients"]}
    width, height = columns * wide + 2, 66 + mesh.world_size // columns * high
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {width} {height}" width="{width}" '
        'font-family="sans-serif" font-size="13">',
        f"<style>\n{STYLE}\n</style>",
        f'<text x="1" y="15">What each of {mesh.world_size} ranks holds: {str(mesh).removeprefix("mesh of ")}</text>',
    ]
    for top, (what, (down, _, across, _)) in zip((24, 42), above.items(), strict=True):
        parts.append(f'<rect x="1" y="{top}" width="12" height="12" fill="{colors[what]}"/>')
        parts.append(f'<text x="19" y="{top + 11}">its part of the {what}: {down} down, {across} across</text>')
    for rank in range(mesh.world_size):
        place = mesh.coordinate(rank)
        left, top = rank % columns * wide + 1, 66 + rank // columns * high
        place_text = ", ".join(f"{axis} {at}" for axis, at in place.items())
        parts.append(f"<g><title>rank {rank}: {place_text}</title>")
        parts.append(f'<text x="{left}" y="{top + 15}" font-weight="bold">rank {rank}</text>')
        for number, (what, (_, vertical, _, horizontal)) in enumerate(above.items()):
            y = top + 22 + number * (2 * cell + 8)
            for row in range(mesh.size(vertical)):
                for column in range(mesh.size(horizontal)):
                    is_here = (place[vertical], place[horizontal]) == (row, column)
                    parts.append(
                        f'<rect class="whole" x="{left + column * cell}" y="{y + row * cell}" width="{cell}" '
                        f'height="{cell}" style="fill: {colors[what] if is_here else "none"}"/>'
                    )
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


PICTURES = {
    "zero/who-keeps-what.svg": draw,
    "guide/pipeline-timelines.svg": draw_timelines,
    "guide/axes.svg": draw_mesh,
}

if __name__ == "__main__":
    for name, drawn in PICTURES.items():
        (Path(__file__).parent / name).write_text(drawn(), encoding="utf-8")
