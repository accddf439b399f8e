"""Draws curves side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Attributes:
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        curves: By name, the values of x and of y. A name has the same color in every panel.
        title: Above the diagram.
        y_limits: Least and largest y that are shown; None: all.
    """

    x_label: str
    y_label: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    title: str = ""
    y_limits: tuple[float, float] | None = None


def draw_panels(path: Path, panels: Sequence[Panel], *, marker: str = "") -> None:
    """Writes a picture of ``panels``, whose format is the ending of ``path``.

    Args:
        path: Of the picture.
        panels: From left to right.
        marker: Shape at each point, as matplotlib names it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    figure, row = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 5), squeeze=False)
    for axes, panel in zip(row[0], panels, strict=True):
        for name, (x, y) in panel.curves.items():
            axes.plot(x, y, color=f"C{names.index(name)}", linewidth=1, marker=marker, label=name)
        if panel.y_limits is not None:
            axes.set_ylim(*panel.y_limits)
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    row[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
