"""Mixture-of-quantization paced by eigenvalues: bits fall later in blocks that rounding harms more."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from deepspeed.compression.eigenvalue import Mean, PowerIteration, as_shares, blocks_of, differentiate
from deepspeed.compression.report import compressed_layers
from deepspeed.compression.techniques import WeightRounding
from deepspeed.compression.widths import BitWidth, WidthSchedule
from deepspeed.config.sections.quantization import EigenvalueSection
from deepspeed.logging import log_dist

ATTRIBUTE = "compression_pace"
"""The attribute of a model that holds its :class:`Pace`."""


@dataclass(frozen=True)
class PacedWidthSchedule(WidthSchedule):
    """A schedule whose periods depend on eigenvalues, so it records each fall instead of computing it from the step."""

    block: int = 0  # number of the block that contains the weight
    # for each fall so far: the update of the fall, and the update at which the next one is due, both counted from
    # ``offset``
    falls: list[tuple[int, int]] = field(default_factory=list)

    @property
    def next_fall(self) -> int | None:
        """The number of updates at which bits fall next, counted from the start of training; None: never again."""
        if len(self.falls) >= self.start - self.target:
            return None
        return self.offset + (self.falls[-1][1] if self.falls else self.period)

    def advance(self, step: int, share: float) -> None:
        """Lowers the bits by one for each fall that is due.

        ``share`` is the block's eigenvalue divided by the largest. The next fall is due after ``1 + floor(4 share)``
        times as many updates as without eigenvalues.
        """
        while (due := self.next_fall) is not None and step >= due:
            self.falls.append((step - self.offset, 2 * (due - self.offset) * (1 + math.floor(4 * share))))

    def at(self, step: int) -> BitWidth | None:
        """Returns the width after ``step`` updates, from the falls so far; None: not rounded yet."""
        count = step - self.offset
        if count < 0:
            return None
        past = [fall for fall, _ in self.falls if fall <= count]
        share = 0.0 if self.mixing is None else max(0.0, 1.0 - self.mixing * (count - (past[-1] if past else 0)))
        return BitWidth(self.start - len(past), share)


class Pace:
    """Paces the bit widths of the weights in a model's blocks by their eigenvalues; replaces their width schedules."""

    def __init__(self, model: nn.Module, section: EigenvalueSection) -> None:
        self._power = PowerIteration(section.max_iter, section.tol, section.stability)
        self._resolution, self._verbose = section.gas_boundary_resolution, section.verbose
        self._blocks = blocks_of(model, section.layer_name, section.layer_num)
        # latest eigenvalues of the blocks, in order; empty before the first measurement
        self.eigenvalues: list[float] = []
        self.widths: dict[str, PacedWidthSchedule] = {}  # the paced schedules, by name of the layer
        roundings: dict[int, WeightRounding] = {}  # by weight: tied layers share a width
        for number, block in enumerate(self._blocks.values()):
            for layer, techniques in compressed_layers(block):
                if (
                    techniques.rounding is None
                    or techniques.rounding.schedule.start <= techniques.rounding.schedule.target
                ):
                    continue
                key = id(layer.weight)
                if key not in roundings:
                    plain = techniques.rounding.schedule
                    paced = PacedWidthSchedule(
                        plain.offset, plain.start, plain.target, plain.period, plain.mixing, number
                    )
                    roundings[key] = replace(techniques.rounding, schedule=paced)
                    self.widths[techniques.name] = paced
        for layer, techniques in compressed_layers(model):
            techniques.rounding = roundings.get(id(getattr(layer, "weight", None)), techniques.rounding)

    def is_due(self, global_steps: int, updates: int) -> bool:
        """Returns whether the next update needs eigenvalues.

        That is so every ``gas_boundary_resolution`` updates, if bits fall before the next of them.

        Of ``updates``, skipped ones are left out.
        """
        if global_steps % self._resolution:
            return False
        return any(
            (due := width.next_fall) is not None and due <= updates + self._resolution for width in self.widths.values()
        )

    def measure(self, loss: torch.Tensor, scale: float, mean: Mean) -> None:
        """Measures each block's eigenvalue of a 0-dim loss, averaged by ``mean``. Every rank must call it."""
        groups = [[p for p in block.parameters() if p.requires_grad] for block in self._blocks.values()]
        every = list(dict.fromkeys(p for group in groups for p in group))
        found = dict(zip(every, differentiate([loss], every, create_graph=True), strict=True))
        self.eigenvalues, lines = [], []
        for number, (name, group) in enumerate(zip(self._blocks, groups, strict=True)):
            value, count = 0.0, 0
            if group:
                gradients = [found[p] for p in group]
                value, count = self._power.dominant(gradients, group, scale=scale, seed=number, mean=mean)
            self.eigenvalues.append(value)
            lines.append(f"{name} {value:.6g} ({count} products)")
        if self._verbose:
            log_dist(f"eigenvalues: {', '.join(lines)}")

    def advance(self, step: int) -> None:
        """Lowers the bits of all weights for which a fall is due after ``step`` updates."""
        shares = as_shares(self.eigenvalues) or [0.0] * len(self._blocks)
        for width in self.widths.values():
            width.advance(step, shares[width.block])

    def state_dict(self) -> dict[str, Any]:
        """Returns the falls so far by layer, and the latest eigenvalues, which determine the next ones."""
        falls = {name: list(width.falls) for name, width in self.widths.items()}
        return {"falls": falls, "eigenvalues": list(self.eigenvalues)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state; layers that it does not list start without a fall."""
        for name, width in self.widths.items():
            width.falls[:] = [(fall, following) for fall, following in state.get("falls", {}).get(name, [])]
        values = state.get("eigenvalues", [])
        self.eigenvalues = list(values) if len(values) == len(self._blocks) else []


def pace_of(model: nn.Module) -> Pace | None:
    """Returns the pace of a model; None if its bits depend on the step alone."""
    return model.__dict__.get(ATTRIBUTE)


def set_pace(model: nn.Module, section: EigenvalueSection | None) -> None:
    """Makes the widths of a prepared model depend on eigenvalues; with None, on the step alone."""
    model.__dict__.pop(ATTRIBUTE, None)
    for _, techniques in compressed_layers(model):
        rounding = techniques.rounding
        if rounding is not None and isinstance(old := rounding.schedule, PacedWidthSchedule):
            plain = WidthSchedule(old.offset, old.start, old.target, old.period, old.mixing)
            techniques.rounding = replace(rounding, schedule=plain)
    if section is not None:
        model.__dict__[ATTRIBUTE] = Pace(model, section)
