"""Formats the results of the tuner: the table of predicted and measured times, the summary, reasons of failures."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from deepspeed.accelerator.devices import in_words
from deepspeed.autotuning.choice import CandidatePlan, TrialQueue
from deepspeed.autotuning.experiment import STAGE

_WIDTH = 118
_SHOWN = 12  # most candidates without a trial in the table
_LONGEST = 600  # characters of a reason


def metric_of(name: str, row: CandidatePlan, seconds: float, samples: int) -> float:
    """Returns a metric: ``latency`` in ms, ``flops`` in FLOP per second and device, else samples per second."""
    if name == "latency":
        return seconds * 1e3
    return row.flops / seconds if name == "flops" else samples / seconds


def as_text(part: RenderableType) -> str:
    """Returns a ``rich`` renderable as plain text."""
    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None).print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def results_table(queue: TrialQueue, *, samples: int) -> Table:
    """Returns a table of the candidates: predicted and measured seconds per update of ``samples`` samples."""
    # Reasons are Text: in a str, rich takes brackets ("[batch, tokens]") as its own markup.
    table = Table(title="Candidates, one update of the same global batch", title_justify="left")
    for heading in ("candidate", "predicted ms", "measured ms", "measured / predicted", "samples/s", "memory", ""):
        is_text = heading in ("candidate", "")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=heading == "candidate")
    tried = sorted(queue.measured, key=lambda name: queue.measured[name])
    rows = {row.name: row for row in queue.rows}
    for name in tried:
        row, seconds = rows[name], queue.measured[name]
        table.add_row(
            name,
            f"{row.seconds * 1e3:.2f}",
            f"{seconds * 1e3:.2f}",
            f"{seconds / row.seconds:.2f}" if row.seconds else "",
            f"{samples / seconds:,.1f}",
            in_words(row.device_bytes),
            "chosen" if name == queue.best else "",
        )
    for name, reason in queue.failed.items():
        row = rows[name]
        table.add_row(name, f"{row.seconds * 1e3:.2f}", "failed", "", "", "", Text(reason))
    left = queue.runnable()
    for row in left[:_SHOWN]:
        table.add_row(
            row.name,
            f"{row.seconds * 1e3:.2f}",
            "",
            "",
            "",
            in_words(row.device_bytes),
            "not needed",
        )
    if len(left) > _SHOWN:
        table.add_row(f"and {len(left) - _SHOWN} slower ones", "", "", "", "", "", "")
    for row in queue.rows:
        if row.refusal:
            table.add_row(row.name, "", "", "", "", "", Text(f"refused: {row.refusal}"))
        elif not row.fits:
            missing = row.device_bytes - row.usable_bytes
            why = f"does not fit, {in_words(missing)} missing" if missing > 0 else "does not fit in host memory"
            table.add_row(row.name, "", "", "", "", in_words(row.device_bytes), why)
    return table


def summary_text(queue: TrialQueue, metric: str, samples: int, seconds: float) -> str:
    """Returns the text of ``summary.txt``: for each ZeRO stage and for all, the number of trials and the best one."""
    rows = {row.name: row for row in queue.rows}
    spaces: dict[str, list[str]] = defaultdict(list)
    for name in queue.measured:
        spaces[f"z{rows[name].changes.get(STAGE, 0)}"].append(name)
    table = Table(title=None)
    for heading in ("tuning_space", "num_experiments", "best_metric_val", "best_exp_name"):
        table.add_column(heading)
    for space, names in [*sorted(spaces.items()), ("global", list(queue.measured))]:
        if names:
            best = min(names, key=lambda name: queue.measured[name])
            value = metric_of(metric, rows[best], queue.measured[best], samples)
            table.add_row(space, str(len(names)), f"{value:,.4g}", best)
    return f"{as_text(table)}Tuning completed in {seconds:.1f} s; metric: {metric}\n"


def reason_of(folder: Path, code: int) -> str:
    """Returns why a start of the script failed, in one line: the first exception, else the launcher's message."""
    for name in ("stderr.log", "stdout.log"):
        path = folder / name
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        found = [index for index, line in enumerate(lines) if _names_an_error(line)]
        if found:
            return _short(_message_at(lines, found[0]))
        # The launcher's own message: a rank was killed, or the script does not exist.
        sentences = [text for line in lines if (text := line.removeprefix("deepspeed: ")) != line]
        if sentences:
            return _short(sentences[0])
    if code == 0:  # an engine would have written why it has measured nothing
        return "the script ended without an engine of deepspeed.initialize; let it make one and train with it"
    return f"exit code {code}; see {folder / 'stderr.log'}"


def _names_an_error(line: str) -> bool:
    words = line.split("] ")[-1].split(":")[0].split()
    return len(words) == 1 and words[0].endswith(("Error", "Exception")) and ":" in line


def _message_at(lines: Sequence[str], start: int) -> str:
    """Returns the (possibly multi-line) message of an exception as one line, without the rank's label."""
    label = re.match(r"\[rank \d+\] ?|", lines[start])
    assert label is not None, "the pattern matches an empty text"
    words = []
    for line in lines[start:]:
        text = line.removeprefix(label[0].rstrip()).strip()
        is_of_rank = line.startswith(label[0].rstrip()) and not line.startswith("deepspeed: ")
        if not is_of_rank or not text or re.match(r"\[(\d\d:|rank)|Traceback ", text):
            break
        words.append(text)
    return " ".join(words).rstrip(".")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
