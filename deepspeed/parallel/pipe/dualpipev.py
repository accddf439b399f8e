"""DualPipeV under its own name: a pipeline module whose schedule is chosen already."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.pipe.module import PipelineModule


class DualPipeVModule(PipelineModule):
    """Rank r of p holds the chunks r and 2 p - 1 - r, so the first one has the beginning and the end of the model.

    Args:
        layers: Layers or layer specs, as :class:`~deepspeed.parallel.pipe.module.PipelineModule` takes them.
        *args: Further arguments of ``PipelineModule``.
        **kwargs: Keyword arguments of ``PipelineModule``.
    """

    def __init__(self, layers: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        if kwargs.setdefault("schedule", "dualpipev") != "dualpipev":
            raise DeepSpeedConfigError(
                f"DualPipeVModule(schedule={kwargs['schedule']!r}): its schedule is dualpipev; use PipelineModule for "
                "others"
            )
        super().__init__(layers, *args, **kwargs)

    @property
    def phase_bounds(self) -> list[tuple[int, int]]:
        """First and last layer, exclusive, of each of this rank's two chunks."""
        return [(self.parts[chunk], self.parts[chunk + 1]) for chunk in self.chunks]

    @property
    def phase_funcs(self) -> list[list[Callable[..., Any]]]:
        """The layers of each of this rank's two chunks."""
        return [[self.forward_funcs[place] for place in self._ranges[chunk]] for chunk in self.chunks]

    @property
    def active_phase(self) -> int:
        """Which of the two chunks ``forward`` runs; 0 by default."""
        return 0 if self.active_chunk is None else self.chunks.index(self.active_chunk)

    def activate_phase(self, phase: int) -> None:
        """Makes ``forward`` run one of the two chunks."""
        self.active_chunk = self.chunks[phase]
