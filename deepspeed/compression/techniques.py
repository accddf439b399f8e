"""The techniques of a compressed layer, and which of them are active after a number of updates."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from deepspeed.compression import rounding
from deepspeed.compression.rounding import RoundedGroups, round_groups, straight_through
from deepspeed.compression.snip import SnipPlan
from deepspeed.compression.widths import BitWidth, WidthSchedule

Kind = Literal["sparse", "row", "head", "channel"]
ORDER: tuple[Kind, ...] = ("sparse", "row", "head", "channel")


@dataclass(frozen=True)
class WeightRounding:
    """Fake quantization of a weight."""

    schedule: WidthSchedule  # the bit width as a function of the step
    # number of equal parts of the flattened weight with a scale each; None: one part for each row
    groups: int | None = 1
    symmetric: bool = True  # round symmetrically around zero
    stochastic: bool = False  # round stochastically, with the same noise on every rank and in every forward of a step

    def round(self, weight: torch.Tensor, bits: int, generator: torch.Generator | None = None) -> RoundedGroups:
        """Returns the codes and scales of ``weight``, ``[out, in, ...]``; ``generator`` draws stochastic noise."""
        groups = len(weight) if self.groups is None else self.groups
        return round_groups(weight.detach().reshape(groups, -1), bits, symmetric=self.symmetric, generator=generator)


@dataclass(frozen=True)
class Pruning:
    """A mask on a weight."""

    kind: Kind  # what is pruned: single weights (``sparse``), rows, heads or channels
    method: str  # ``l1``, ``topk`` or ``snip_momentum``
    share: float  # fraction that is kept
    offset: int  # number of updates after which pruning starts
    heads: int | None = None  # number of heads, for the kind ``head``
    plan: SnipPlan | None = None  # the plan of ``snip_momentum``

    @property
    def has_mask(self) -> bool:
        """Whether the mask is a buffer; otherwise it follows from trained scores."""
        return self.method != "topk"

    @property
    def buffer(self) -> str:
        """Name of the layer's buffer with the mask."""
        return f"{self.kind}_pruning_mask"

    @property
    def scores(self) -> str:
        """Name of the layer's parameter with the scores of ``topk``."""
        return "head_pruning_scores" if self.kind == "head" else f"{self.kind}_mask_scores"


@dataclass
class Techniques:
    """The techniques of one layer."""

    name: str  # the layer's name in the model
    is_transposed: bool = False  # whether its weight is stored as ``[in, out]``
    rounding: WeightRounding | None = None
    prunings: dict[Kind, Pruning] = field(default_factory=dict)  # the prunings of the weight, by kind
    # by kind of pruning, names of the layers that lose inputs or outputs with this one
    related: dict[Kind, list[str]] = field(default_factory=dict)
    activation_offset: int | None = None  # number of updates after which the input is rounded; None: never
    width: BitWidth | None = None  # present bit width of the weight; None: not rounded
    acting: frozenset[Kind] = frozenset()  # the kinds of pruning that are active now
    step: int = 0  # number of updates, which seeds stochastic rounding
    original_class: Any = None  # the layer's class before compression, to be restored

    def at(self, step: int) -> None:
        """Activates the techniques that are due after ``step`` updates."""
        if self.rounding is not None:
            self.width = self.rounding.schedule.at(step)
            self.step = step if self.rounding.stochastic else 0
        self.acting = frozenset(kind for kind, pruning in self.prunings.items() if step >= pruning.offset)

    def at_the_end(self) -> None:
        """Activates all techniques, with the final bit width."""
        if self.rounding is not None:
            self.width = BitWidth(self.rounding.schedule.target, 0.0)
        self.acting = frozenset(self.prunings)

    # -- the weight --------------------------------------------------------------------------------------------------

    def effective(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the compressed weight ``[out, in, ...]`` and bias; gradients reach the original ones."""
        weight, bias = layer.weight, getattr(layer, "bias", None)
        assert isinstance(weight, torch.Tensor)
        if self.is_transposed:
            weight = weight.t()
        weight = self.rounded(weight)
        for kind in ORDER:
            if kind in self.acting:
                mask = self.mask(layer, kind).to(weight.dtype)
                weight = weight * spread(mask, kind, weight)
                if kind in ("row", "channel") and bias is not None:
                    bias = bias * mask
        return weight, bias

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns ``weight``, ``[out, in, ...]``, rounded to its present bit width."""
        if self.width is None or self.rounding is None:
            return weight
        with torch.no_grad():
            rounded = self.rounding.round(weight, self.width.bits, self._generator(weight.device))
            fake = rounded.values().view(weight.shape).to(weight.dtype)
        result = straight_through(weight, fake)
        share = self.width.whole_share
        return result if share == 0 else share * weight + (1 - share) * result

    def _generator(self, device: torch.device) -> torch.Generator | None:
        """Returns a generator with equal noise on all ranks and in recomputed forwards; None if rounding needs none."""
        if self.rounding is None or not self.rounding.stochastic:
            return None
        return torch.Generator(device).manual_seed(zlib.crc32(f"{self.name} {self.step}".encode()))

    def mask(self, layer: nn.Module, kind: Kind) -> torch.Tensor:
        """Returns the mask, nonzero for what is kept: in the weight's shape, or one number per row, head or channel."""
        pruning = self.prunings[kind]
        if pruning.has_mask:
            mask = getattr(layer, pruning.buffer)
            assert isinstance(mask, torch.Tensor)
            return mask
        learned = rounding.learned(getattr(layer, pruning.scores), pruning.share)
        return learned if kind == "sparse" else learned.flatten()


def spread(mask: torch.Tensor, kind: Kind, weight: torch.Tensor) -> torch.Tensor:
    """Returns the mask in a shape that broadcasts to ``weight``, ``[out, in, ...]``."""
    if kind == "sparse":
        return mask
    if kind == "head":
        return mask.repeat_interleave(weight.shape[1] // len(mask))[None, :]
    return mask.view(-1, *([1] * (weight.dim() - 1)))
