"""What is done to one layer, and since when: the techniques of a compressed layer as plain values."""

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
    """Fake quantisation of a weight.

    Attributes:
        schedule: Its width by the step.
        groups: Equal slices of the flattened weight with scales of their own; None: one for each row.
        symmetric: Kind of scale.
        stochastic: Round by chance; the same chance on every rank and in every forward of a step.
    """

    schedule: WidthSchedule
    groups: int | None = 1
    symmetric: bool = True
    stochastic: bool = False

    def round(self, weight: torch.Tensor, bits: int, generator: torch.Generator | None = None) -> RoundedGroups:
        """Returns the codes and scales of ``weight``, ``[out, in, ...]``."""
        groups = len(weight) if self.groups is None else self.groups
        return round_groups(weight.detach().reshape(groups, -1), bits, symmetric=self.symmetric, generator=generator)


@dataclass(frozen=True)
class Pruning:
    """A mask on a weight.

    Attributes:
        kind: What is pruned.
        method: ``l1``, ``topk`` or ``snip_momentum``.
        share: What is kept.
        offset: Updates before which nothing is pruned.
        heads: Number of heads, for the kind ``head``.
        plan: The plan of ``snip_momentum``.
    """

    kind: Kind
    method: str
    share: float
    offset: int
    heads: int | None = None
    plan: SnipPlan | None = None

    @property
    def has_mask(self) -> bool:
        """Returns whether the mask is a buffer; otherwise it comes from scores that are trained."""
        return self.method != "topk"

    @property
    def buffer(self) -> str:
        """The layer's name for the mask."""
        return f"{self.kind}_pruning_mask"

    @property
    def scores(self) -> str:
        """The layer's name for the scores of ``topk``."""
        return "head_pruning_scores" if self.kind == "head" else f"{self.kind}_mask_scores"


@dataclass
class Techniques:
    """The techniques that act on one layer.

    Attributes:
        name: The layer's name in the model.
        is_transposed: Its weight is kept as ``[in, out]``.
        rounding: How the weight is rounded, or None.
        prunings: By kind.
        related: By kind of pruning, the layers that lose inputs or outputs with this one.
        activation_offset: Updates before which activations are whole; None: they always are.
        width: Bits of the weight now; None: not rounded.
        acting: The kinds of pruning that act now.
        step: The update that stochastic rounding draws for.
        original_class: The layer's class before compression, to be restored.
    """

    name: str
    is_transposed: bool = False
    rounding: WeightRounding | None = None
    prunings: dict[Kind, Pruning] = field(default_factory=dict)
    related: dict[Kind, list[str]] = field(default_factory=dict)
    activation_offset: int | None = None
    width: BitWidth | None = None
    acting: frozenset[Kind] = frozenset()
    step: int = 0
    original_class: Any = None

    def at(self, step: int) -> None:
        """Goes to what acts after this many updates."""
        if self.rounding is not None:
            self.width = self.rounding.schedule.at(step)
            self.step = step if self.rounding.stochastic else 0
        self.acting = frozenset(kind for kind, pruning in self.prunings.items() if step >= pruning.offset)

    def at_the_end(self) -> None:
        """Goes to where everything acts, with its last width."""
        if self.rounding is not None:
            self.width = BitWidth(self.rounding.schedule.target, 0.0)
        self.acting = frozenset(self.prunings)

    # -- the weight --------------------------------------------------------------------------------------------------

    def effective(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns weight ``[out, in, ...]`` and bias as the layer uses them now; gradients reach the original ones."""
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
        """Returns ``weight``, ``[out, in, ...]``, rounded to its present bits."""
        if self.width is None or self.rounding is None:
            return weight
        with torch.no_grad():
            rounded = self.rounding.round(weight, self.width.bits, self._generator(weight.device))
            fake = rounded.values().view(weight.shape).to(weight.dtype)
        result = straight_through(weight, fake)
        share = self.width.whole_share
        return result if share == 0 else share * weight + (1 - share) * result

    def _generator(self, device: torch.device) -> torch.Generator | None:
        """Returns a generator that gives equal noise on every rank, and again where a forward is recomputed."""
        if self.rounding is None or not self.rounding.stochastic:
            return None
        seed = zlib.crc32(f"{self.name} {self.step}".encode())
        return torch.Generator(device).manual_seed(seed)

    def mask(self, layer: nn.Module, kind: Kind) -> torch.Tensor:
        """Returns 1 for what is kept: in the weight's shape, or one number per row, head or channel."""
        pruning = self.prunings[kind]
        if pruning.has_mask:
            mask = getattr(layer, pruning.buffer)
            assert isinstance(mask, torch.Tensor)
            return mask
        scores = getattr(layer, pruning.scores)
        learned = rounding.learned(scores, pruning.share)
        return learned if kind == "sparse" else learned.flatten()


def spread(mask: torch.Tensor, kind: Kind, weight: torch.Tensor) -> torch.Tensor:
    """Returns the mask in a shape that multiplies ``weight``, ``[out, in, ...]``."""
    if kind == "sparse":
        return mask
    if kind == "head":
        return mask.repeat_interleave(weight.shape[1] // len(mask))[None, :]
    return mask.view(-1, *([1] * (weight.dim() - 1)))
