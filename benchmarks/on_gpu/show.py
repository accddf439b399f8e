"""Shows the parts of the GPU benchmark: tables in the terminal and in Markdown, and a picture of step times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from on_gpu.part import show

Found = Mapping[str, Mapping[str, Any]]


def tables(console: Console, found: Found) -> None:
    """Prints the tables and problems of every part."""
    for content in found.values():
        console.rule(content["title"])
        for table in content["tables"]:
            drawn = Table(title=table["title"], caption=table["about"] or None)
            for column in table["columns"]:
                drawn.add_column(column, overflow="fold")
            for row in table["rows"]:
                drawn.add_row(*[show(value) for value in row])
            console.print(drawn)
        for problem in content["problems"]:
            console.print(f"PROBLEM: {problem}", style="bold red", markup=False)


def markdown(found: Found, drawn: str | None) -> str:
    """Returns the report in Markdown.

    Args:
        found: The parts.
        drawn: Name of the picture without its ending; None: there is no picture.
    """
    lines = ["# On a GPU", "", "Made by `python benchmarks/gpu.py --write-report`.", ""]
    lines += [f"![Step times]({drawn}.png)", ""] if drawn else []
    for content in found.values():
        lines += [f"## {content['title']}", ""]
        for table in content["tables"]:
            lines += [f"**{table['title']}**", "", *([table["about"], ""] if table["about"] else [])]
            lines += ["| " + " | ".join(table["columns"]) + " |", "|" + "---|" * len(table["columns"])]
            lines += ["| " + " | ".join(show(v).replace("|", "\\|") for v in row) + " |" for row in table["rows"]]
            lines.append("")
        lines += [f"- PROBLEM: {problem}" for problem in content["problems"]]
        lines += [""] if content["problems"] else []
    return "\n".join(lines)


def picture(path: Path, found: Found) -> bool:
    """Draws the step times of every table that has some; returns whether there was one.

    Args:
        path: Of the PNG.
        found: The parts; a table with the columns ``who`` and ``step (ms)`` is drawn.
    """
    drawn = [
        table
        for content in found.values()
        for table in content["tables"]
        if {"who", "step (ms)"} <= {*table["columns"]} and table["rows"]
    ]
    if not drawn:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(drawn), 1, figsize=(9, 1 + 2.6 * len(drawn)), squeeze=False)
    for axis, table in zip(axes[:, 0], drawn, strict=True):
        who, time = table["columns"].index("who"), table["columns"].index("step (ms)")
        rows = [row for row in table["rows"] if row[time] is not None][::-1]
        axis.barh([row[who] for row in rows], [row[time] for row in rows], color="#5b8cc9")
        axis.set_xlabel("milliseconds per step")
        axis.set_title(table["title"])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
