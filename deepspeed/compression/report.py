"""Reports compression: log lines at installation and when a technique starts, and the state of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed.compression.rounding import kept_count
from deepspeed.compression.settings import PRUNED, Selection
from deepspeed.compression.snip import SnipPlan
from deepspeed.compression.techniques import Techniques
from deepspeed.logging import log_dist


@dataclass(frozen=True)
class LayerState:
    """The compression techniques that are active on one layer."""

    name: str  # the layer's name in the model
    bits: int | None  # bits of its weight; None: not rounded
    activation_bits: int | None  # bits of its input; None: not rounded
    kept: dict[str, float]  # by kind of pruning, the fraction that is kept


def compressed_layers(model: nn.Module) -> Iterator[tuple[nn.Module, Techniques]]:
    """Yields every compressed layer of a model with its techniques."""
    for module in model.modules():
        found = module.__dict__.get("compression")
        if isinstance(found, Techniques):
            yield module, found


def compression_state(model: nn.Module) -> list[LayerState]:
    """Returns the achieved bits and densities of every compressed layer now, before :func:`redundancy_clean`.

    The density of a learned mask follows from its ``dense_ratio``, so no parameters are gathered.
    """
    found = []
    for module, techniques in compressed_layers(model):
        quantizer: Any = getattr(module, "activation_quantizer", None)
        found.append(
            LayerState(
                techniques.name,
                None if techniques.width is None else techniques.width.bits,
                quantizer.bits if quantizer is not None and quantizer.is_acting else None,
                {kind: _kept(module, techniques, kind) for kind in sorted(techniques.acting)},
            )
        )
    return found


def _kept(module: Any, techniques: Techniques, kind: Any) -> float:
    pruning = techniques.prunings[kind]
    if pruning.has_mask:
        return float(getattr(module, pruning.buffer).float().mean())
    scores = getattr(module, pruning.scores)
    total = getattr(scores, "ds_numel", scores.numel())
    return kept_count(total, pruning.share) / total


def announce(selections: list[Selection]) -> None:
    """Logs one line per group: its technique, its number of layers, and the first update with it."""
    for selection in selections:
        log_dist(
            f"compression: {selection.technique}, group {selection.group}: {len(selection.names)} layers "
            f"({selection.names[0]}{', ...' if len(selection.names) > 1 else ''}), {_plan(selection)}"
        )


def _plan(selection: Selection) -> str:
    shared, params = selection.shared, selection.params
    begin = f"from update {shared.schedule_offset:,} on"
    if selection.is_snip:
        plan = SnipPlan.of(shared)
        return (
            f"{plan.share:g} of the weights kept by snip_momentum in blocks of {shared.block_pattern}, by "
            f"{plan.prunings} prunings {begin}"
        )
    if selection.technique in PRUNED:
        return f"{params.dense_ratio:g} of {_WHAT[selection.technique]} kept by {shared.method} {begin}"
    if selection.technique == "activation_quantization":
        return f"{params.bits} bits, {shared.quantization_type}, {shared.range_calibration} range, {begin}"
    kind = f"{shared.quantization_type}, {shared.rounding} rounding"
    if shared.quantize_weight_in_forward or params.start_bits == params.target_bits:
        return f"{params.target_bits} bits, {kind}, {begin}"
    return (
        f"{params.start_bits} bits, {kind}, {begin}; one bit fewer {params.quantization_period:,} updates later and "
        f"after twice as many each further time, down to {params.target_bits}"
    )


_WHAT = {
    "sparse_pruning": "the weights",
    "row_pruning": "the rows",
    "head_pruning": "the heads",
    "channel_pruning": "the channels",
}


def changes(before: list[LayerState], after: list[LayerState], step: int) -> list[str]:
    """Returns the techniques that became active between two states, one line for each kind of change."""
    counts: Counter[str] = Counter()
    kept: dict[str, list[float]] = {}
    for old, new in zip(before, after, strict=True):
        if new.bits != old.bits:
            counts["weights whole" if new.bits is None else f"weights in {new.bits} bits"] += 1
        if new.activation_bits != old.activation_bits:
            bits = new.activation_bits
            counts["activations whole" if bits is None else f"activations in {bits} bits"] += 1
        for kind, part in new.kept.items():
            if kind not in old.kept:
                counts[f"{kind} pruning"] += 1
                kept.setdefault(f"{kind} pruning", []).append(part)
    lines = []
    for what, count in counts.items():
        shares = kept.get(what)
        share = "" if shares is None else f", {sum(shares) / len(shares):.3f} kept on average"
        lines.append(f"compression: from update {step:,} on {what} in {count} layers{share}")
    return lines
