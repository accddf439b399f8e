"""Bits that fall later in blocks that suffer more from it: mixture-of-quantisation paced by eigenvalues."""

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
"""The model's name for its :class:`Pace`."""


@dataclass(frozen=True)
class PacedWidthSchedule(WidthSchedule):
    """A schedule whose periods are stretched as it goes: its falls are remembered, as no formula gives them.

    Attributes:
        block: Number of the block that the weight is in.
        falls: For each fall so far, the updates after which it was, and those after which the next one is due; counted
            from ``offset``.
    """

    block: int = 0
    falls: list[tuple[int, int]] = field(default_factory=list)

    @property
    def next_fall(self) -> int | None:
        """Updates after which bits fall next, counted from the first of all; None: never again."""
        if len(self.falls) >= self.start - self.target:
            return None
        return self.offset + (self.falls[-1][1] if self.falls else self.period)

    def advance(self, step: int, share: float) -> None:
        """Lets bits fall where that is due after this many updates.

        Args:
            step: Updates so far.
            share: The block's eigenvalue, as a share of the largest: the next period is ``1 + floor(4 share)`` times
                as long as without.
        """
        while (due := self.next_fall) is not None and step >= due:
            self.falls.append((step - self.offset, 2 * (due - self.offset) * (1 + math.floor(4 * share))))

    def at(self, step: int) -> BitWidth | None:
        """Returns the width after this many updates, as far as it is known; None: whole."""
        count = step - self.offset
        if count < 0:
            return None
        past = [fall for fall, _ in self.falls if fall <= count]
        share = 0.0 if self.mixing is None else max(0.0, 1.0 - self.mixing * (count - (past[-1] if past else 0)))
        return BitWidth(self.start - len(past), share)


class Pace:
    """The widths of the weights in a model's blocks, and the eigenvalues that pace them.

    Args:
        model: Prepared by ``init_compression`` or ``quantize_training``; widths of its blocks become paced ones.
        section: The section ``eigenvalue``.

    Attributes:
        eigenvalues: Latest eigenvalues of the blocks, in order; empty before a measurement.
    """

    def __init__(self, model: nn.Module, section: EigenvalueSection) -> None:
        self._power = PowerIteration(section.max_iter, section.tol, section.stability)
        self._resolution, self._verbose = section.gas_boundary_resolution, section.verbose
        self._blocks = blocks_of(model, section.layer_name, section.layer_num)
        self.eigenvalues: list[float] = []
        self.widths: dict[str, PacedWidthSchedule] = {}
        roundings: dict[int, WeightRounding] = {}  # by weight: layers that share one have one width
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
        """Returns whether the next update needs eigenvalues: at one of its turns, if bits fall before the next.

        Args:
            global_steps: Updates so far, skipped ones included.
            updates: Without them.
        """
        if global_steps % self._resolution:
            return False
        return any(
            (due := width.next_fall) is not None and due <= updates + self._resolution for width in self.widths.values()
        )

    def measure(self, loss: torch.Tensor, scale: float, mean: Mean) -> None:
        """Finds the eigenvalue of every block. Every rank must call it before the graph of its loss is freed.

        Args:
            loss: Scalar.
            scale: What it was multiplied by.
            mean: Values are those of the mean of all losses, see :class:`PowerIteration`.
        """
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
        """Lets bits fall where that is due after this many updates."""
        shares = as_shares(self.eigenvalues) or [0.0] * len(self._blocks)
        for width in self.widths.values():
            width.advance(step, shares[width.block])

    def state_dict(self) -> dict[str, Any]:
        """Falls so far by layer, and the eigenvalues that the next ones go by."""
        falls = {name: list(width.falls) for name, width in self.widths.items()}
        return {"falls": falls, "eigenvalues": list(self.eigenvalues)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a state; any other has not fallen yet."""
        for name, width in self.widths.items():
            width.falls[:] = [(fall, following) for fall, following in state.get("falls", {}).get(name, [])]
        values = state.get("eigenvalues", [])
        self.eigenvalues = list(values) if len(values) == len(self._blocks) else []


def pace_of(model: nn.Module) -> Pace | None:
    """Returns the pace of a model; None where its bits fall by the step alone."""
    found: Pace | None = model.__dict__.get(ATTRIBUTE)
    return found


def set_pace(model: nn.Module, section: EigenvalueSection | None) -> None:
    """Lets eigenvalues pace the widths of a prepared model from now on, or (None) the step alone."""
    model.__dict__.pop(ATTRIBUTE, None)
    for _, techniques in compressed_layers(model):
        rounding = techniques.rounding
        if rounding is not None and isinstance(old := rounding.schedule, PacedWidthSchedule):
            plain = WidthSchedule(old.offset, old.start, old.target, old.period, old.mixing)
            techniques.rounding = replace(rounding, schedule=plain)
    if section is not None:
        model.__dict__[ATTRIBUTE] = Pace(model, section)
