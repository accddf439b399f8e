"""``python -m deepspeed.parallel.pipe.show``: draws the timelines of pipeline schedules, without a device.

Without ``--schedule`` it compares all of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deepspeed.parallel.pipe.schedule import (
    TRAIN_SCHEDULES,
    Action,
    Kind,
    Schedule,
    StageSchedule,
    make_inference,
    make_schedule,
)
from deepspeed.parallel.pipe.schedule.simulate import Timeline, Times, simulate


def main(args: Sequence[str] | None = None) -> int:
    """Prints the schedules; the exit code is 2 if what was requested is not possible."""
    options = _parser().parse_args(args)
    try:
        return _show(options)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed.parallel.pipe.show", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--schedule", choices=(*TRAIN_SCHEDULES, "inference"), help="show this schedule, step by step")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--num-chunks", type=int, help="chunks per stage, for interleaved and zb-h1")
    times = parser.add_argument_group("times of a stage and micro-batch, in milliseconds")
    times.add_argument("--forward", type=float, default=40.0)
    times.add_argument("--backward", type=float, default=80.0, help="time of the whole backward")
    times.add_argument("--weight", type=float, help="time of the part for weights; default: half of the backward")
    times.add_argument("--transfer", type=float, default=0.0, help="time to send a result to the next stage")
    parser.add_argument("--instructions", type=int, metavar="STAGE", help="print the instructions of this stage")
    parser.add_argument("--picture", metavar="FILE.svg", help="draw the timelines")
    return parser


def _show(options: argparse.Namespace) -> int:
    times = _times(options)
    names = [options.schedule] if options.schedule else list(TRAIN_SCHEDULES)
    shown = [_simulated(name, options, times) for name in names]
    console = Console(soft_wrap=True)
    console.print(_table(shown))
    if options.schedule:
        _, timeline = shown[0]
        console.print("digits: forwards by micro-batch, letters: backwards, capitals: their part for weights\n")
        for stage, line in enumerate(lines(timeline, max(20, console.width - 10))):
            console.print(f"stage {stage:2} {line}", markup=False, highlight=False)
    if options.instructions is not None:
        if not options.schedule:
            raise ValueError("--instructions prints one schedule's; give --schedule too")
        for step in StageSchedule(shown[0][0], options.instructions):
            console.print("; ".join(map(repr, step)), markup=False, highlight=False)
    if options.picture:
        titled = [(title(schedule, timeline), schedule, timeline) for schedule, timeline in shown]
        _write(Path(options.picture), svg(titled))
    return 0


def _times(options: argparse.Namespace) -> Times:
    weight = options.backward / 2 if options.weight is None else options.weight
    if min(options.forward, options.backward, options.transfer) < 0 or not 0 <= weight <= options.backward:
        raise ValueError(
            f"--forward {options.forward:g} --backward {options.backward:g} --weight {weight:g} "
            f"--transfer {options.transfer:g}: times must be 0 or more, and weight a part of backward"
        )
    return Times(options.forward, options.backward, weight, options.transfer)


def _simulated(name: str, options: argparse.Namespace, times: Times) -> tuple[Schedule, Timeline]:
    stages, micro_batches, chunks = options.stages, options.micro_batches, options.num_chunks
    if name == "inference":
        schedule = make_inference(tuple(range(stages)) * (chunks or 1), micro_batches)
    else:
        # In the comparison the number of chunks applies to schedules that support it.
        applies = options.schedule or name in ("interleaved", "zb-h1")
        schedule = make_schedule(name, stages, micro_batches, chunks if applies else None)
    return schedule, simulate(schedule, times)


def _table(shown: list[tuple[Schedule, Timeline]]) -> Table:
    first = shown[0][0]
    table = Table(title=f"{first.stages} stages, {first.micro_batches} micro-batches", title_justify="left")
    table.add_column("schedule")
    for column in ("chunks per stage", "step (ms)", "idle (%)", "activations held", "sends per stage"):
        table.add_column(column, justify="right")
    for schedule, timeline in shown:
        per_stage = schedule.chunks / schedule.stages
        # In micro-batches of a whole stage, so that schedules with another number of chunks compare.
        held = [count / per_stage for count in timeline.held]
        idle = max(timeline.idle(stage) for stage in range(schedule.stages)) / (timeline.makespan or 1.0)
        words = f"{max(held):g}" if max(held) == min(held) else f"{max(held):g} to {min(held):g}"
        table.add_row(
            schedule.name,
            f"{per_stage:g}",
            f"{timeline.makespan:g}",
            f"{100 * idle:.1f}",
            words,
            str(max(_sends(schedule, stage) for stage in range(schedule.stages))),
        )
    return table


def _sends(schedule: Schedule, stage: int) -> int:
    listed = (instruction for step in StageSchedule(schedule, stage) for instruction in step)
    return sum(instruction.name.startswith("Send") and instruction.peer != stage for instruction in listed)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--picture {path}: cannot be written ({error}); choose another place") from error


_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, inputs",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}
_COLORS = {
    Kind.FORWARD: "#5b8cc9",
    Kind.BACKWARD: "#54a24b",
    Kind.BACKWARD_INPUT: "#8cc084",
    Kind.BACKWARD_WEIGHT: "#f58518",
}
_LABEL, _ROW, _BAR, _TOP = 62, 26, 22, 50  # pixels: width of a row's name, height of a row and of its bars, first row

# Inside a page it uses the page's colors; as a separate picture those of the reader's system.
_STYLE = """\
.picture { --ink: var(--md-typeset-color, #222); --line: var(--md-default-fg-color--lighter, #aaa); }
@media (prefers-color-scheme: dark) {
  .picture { --ink: var(--md-typeset-color, #ddd); --line: var(--md-default-fg-color--lighter, #777); }
}
.picture text { fill: var(--ink); }
.picture .whole { fill: none; stroke: var(--line); }
.picture g text { fill: #111; font-size: 11px; text-anchor: middle; }
.picture g rect { stroke: #fff; stroke-width: 0.5; }
"""
_STYLE += "\n".join(f".picture .{kind.value} {{ fill: {color}; }}" for kind, color in _COLORS.items())


def letter(action: Action) -> str:
    """Returns one character: the micro-batch as a digit in forwards, a letter in backwards, a capital for weights."""
    if action.kind is Kind.FORWARD:
        return str(action.micro_batch % 10)
    small = chr(ord("a") + action.micro_batch % 26)
    return small.upper() if action.kind is Kind.BACKWARD_WEIGHT else small


def lines(timeline: Timeline, width: int) -> list[str]:
    """Returns one line of text per stage, at most ``width`` characters; dots where the stage is idle.

    A character stands for the shortest computation where that fits, else for more.
    """
    shortest = min((span.end - span.start for spans in timeline.spans for span in spans), default=0.0)
    unit = max(timeline.makespan / max(width, 1), shortest) or 1.0
    found = []
    for spans in timeline.spans:
        cells = ["."] * round(timeline.makespan / unit)
        for span in spans:
            for cell in range(round(span.start / unit), round(span.end / unit)):
                cells[cell] = letter(span.action)
        found.append("".join(cells))
    return found


def title(schedule: Schedule, timeline: Timeline) -> str:
    """Returns what a timeline shows, in words; its times are milliseconds."""
    chunks = schedule.chunks // schedule.stages
    return f"{schedule.name}{f', {chunks} chunks per stage' if chunks > 1 else ''}: {timeline.makespan:g} ms"


def svg(titled: Sequence[tuple[str, Schedule, Timeline]], width: int = 900) -> str:
    """Draws timelines, each with title and schedule, below each other on one scale of time; ``width`` is in pixels."""
    scale = (width - _LABEL - 8) / max(timeline.makespan for _, _, timeline in titled)
    kinds = {span.action.kind for _, _, timeline in titled for spans in timeline.spans for span in spans}
    parts, left = [], 1
    for kind in (kind for kind in Kind if kind in kinds):
        parts.append(f'<rect x="{left}" y="4" width="12" height="12" fill="{_COLORS[kind]}"/>')
        parts.append(f'<text x="{left + 18}" y="15">{_WORDS[kind]}</text>')
        left += 40 + 8 * len(_WORDS[kind])
    parts.append(f'<text x="{left}" y="15">faint: the later chunks of a stage</text>')
    top = _TOP
    for name, schedule, timeline in titled:
        parts.append(f'<text x="1" y="{top - 8}" font-weight="bold">{escape(name)}</text>')
        for stage, spans in enumerate(timeline.spans):
            place = f'y="{top}" height="{_BAR}"'
            parts.append(f'<text x="1" y="{top + 16}">stage {stage}</text>')
            end = timeline.makespan * scale
            parts.append(f'<rect class="whole" x="{_LABEL}" {place} width="{end:.1f}"/>')
            own = schedule.chunks_of(stage)
            for action, start, end in spans:
                x, wide = _LABEL + start * scale, (end - start) * scale
                opacity = 1 - 0.5 * own.index(action.chunk) / len(own)
                words = f"{_WORDS[action.kind]} of micro-batch {action.micro_batch}, chunk {action.chunk}"
                faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
                parts.append(
                    f'<g><title>{words}</title><rect x="{x:.1f}" {place} width="{wide:.1f}" class="{action.kind.value}"'
                    f'{faint}/><text x="{x + wide / 2:.1f}" y="{top + 16}">{action.micro_batch}</text></g>'
                )
            top += _ROW
        top += 36
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {width} {top - 24}" width="{width}" '
        'font-family="sans-serif" font-size="14">'
    )
    return "\n".join([head, f"<style>\n{_STYLE}\n</style>", *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
