"""What ``compression_training`` lacks or contradicts."""

from __future__ import annotations

import re
from typing import Any

from deepspeed.config.messages import ConfigMessages, Path, dotted
from deepspeed.config.sections.compression import CompressionTraining, LayerReduction, SparsePruning
from deepspeed.config.sections.root import Root

AT: Path = ("compression_training",)
_REQUIRED = {
    "weight_quantization": ("start_bits", "target_bits"),
    "activation_quantization": ("bits",),
    "sparse_pruning": ("dense_ratio",),
    "row_pruning": ("dense_ratio",),
    "channel_pruning": ("dense_ratio",),
    "head_pruning": ("dense_ratio",),
}
"""What each group's ``params`` must hold, by technique."""
_OF_SNIP = {"block_pattern", "dense_ratio", "schedule_offset_stride", "schedule_offset_end", "excluded_modules"}
LEAST_LEVELS = 3
"""From so many bits on codes are levels between two ends; below, they are signs."""


def check_compression(root: Root, findings: ConfigMessages) -> None:
    """Reports what the techniques that are switched on lack or contradict."""
    section = root.compression_training
    if section is None:
        return
    if section.layer_reduction is not None and section.layer_reduction.enabled:
        _layers(section.layer_reduction, findings)
    for name, required in _REQUIRED.items():
        technique = getattr(section, name)
        if technique is None or not technique.shared_parameters.enabled:
            continue
        by_snip = name == "sparse_pruning" and technique.shared_parameters.method == "snip_momentum"
        if not technique.different_groups and not by_snip:
            findings.problem((*AT, name, "different_groups"), "is required once the technique is enabled, and missing")
        for group, settings in technique.different_groups.items():
            at: Path = (*AT, name, "different_groups", group)
            for key in required:
                if getattr(settings.params, key) is None and not by_snip:
                    findings.problem((*at, "params", key), "is required, and missing")
            if not settings.modules:
                findings.problem((*at, "modules"), "expected at least one part of a name, found none")
    _widths(section, findings)
    sparse = section.sparse_pruning
    if sparse is not None and sparse.shared_parameters.enabled:
        _sparse(sparse, findings)
    heads = section.head_pruning
    if heads is not None and heads.shared_parameters.enabled and heads.shared_parameters.num_heads is None:
        findings.problem((*AT, "head_pruning", "shared_parameters", "num_heads"), "is required, and missing")


def _sparse(section: SparsePruning, findings: ConfigMessages) -> None:
    at: Path = (*AT, "sparse_pruning", "shared_parameters")
    shared = section.shared_parameters
    if shared.method != "snip_momentum":
        if idle := sorted(shared.model_fields_set & _OF_SNIP):
            findings.notice(f"{dotted(at)}: {', '.join(idle)} act with the method snip_momentum alone")
        return
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shared.block_pattern):
        findings.problem((*at, "block_pattern"), f"expected ROWSxCOLUMNS, such as 4x1, found {shared.block_pattern!r}")
    if shared.schedule_offset < 1:
        findings.problem((*at, "schedule_offset"), "expected at least 1, as scores are computed from updates; found 0")
    end = shared.schedule_offset_end
    if end is not None and end < shared.schedule_offset:
        findings.problem(
            (*at, "schedule_offset_end"),
            f"{end} is before schedule_offset {shared.schedule_offset}",
            (*at, "schedule_offset"),
        )
    for name, group in section.different_groups.items():
        if group.params.dense_ratio not in (None, shared.dense_ratio):
            findings.problem(
                (*AT, "sparse_pruning", "different_groups", name, "params", "dense_ratio"),
                f"{group.params.dense_ratio:g}: snip_momentum compares all layers with each other, so there is one "
                "shared_parameters.dense_ratio; leave this one out",
            )
        if group.related_modules:
            findings.problem(
                (*AT, "sparse_pruning", "different_groups", name, "related_modules"),
                "blocks of weights cannot be removed from other layers; leave the key out",
            )


def _layers(section: LayerReduction, findings: ConfigMessages) -> None:
    at: Path = (*AT, "layer_reduction")
    for name in ("module_name_prefix", "teacher_layer"):
        if getattr(section, name) is None:
            findings.problem((*at, name), "is required once layers are reduced, and missing")
    count, chosen = section.keep_number_layer, section.teacher_layer
    if count is not None and chosen is not None and count != len(chosen):
        findings.problem(
            (*at, "keep_number_layer"), f"{count}, but {len(chosen)} layers are named", (*at, "teacher_layer")
        )


def check_quantize_training(root: Root, findings: ConfigMessages) -> None:
    """Reports a period of 0 between falls of bits in ``quantize_training``."""
    section = root.quantize_training
    if section is None or not section.enabled:
        return
    bits = section.quantize_bits
    if bits.start_bits > bits.target_bits:
        at: Path = ("quantize_training", "quantize_schedule", "quantize_period")
        _period(section.quantize_schedule.quantize_period, bits.start_bits, bits.target_bits, at, findings)


def _period(period: int, start: int, target: int, at: Path, findings: ConfigMessages) -> None:
    """Reports a period of 0 where bits fall from ``start`` to ``target``."""
    if period == 0:
        findings.problem(
            at,
            f"0: expected at least 1 step, as bits fall from {start} to {target}. Give a period, or equal start_bits "
            "and target_bits",
        )


def _widths(section: CompressionTraining, findings: ConfigMessages) -> None:
    activations = section.activation_quantization
    if activations is not None and activations.shared_parameters.enabled:
        for name, group in activations.different_groups.items():
            bits = group.params.bits
            if bits is not None and not LEAST_LEVELS <= bits <= 16:
                at: Path = (*AT, "activation_quantization", "different_groups", name, "params", "bits")
                findings.problem(at, f"{bits}: activations can have {LEAST_LEVELS} to 16 bits")
    weights = section.weight_quantization
    if weights is None or not weights.shared_parameters.enabled:
        return
    shared: Any = weights.shared_parameters
    for name, widths in weights.different_groups.items():
        at = (*AT, "weight_quantization", "different_groups", name, "params")
        start, target = widths.params.start_bits, widths.params.target_bits
        if start is None or target is None:
            continue
        if start < target:
            findings.problem((*at, "start_bits"), f"{start} is less than target_bits {target}", (*at, "target_bits"))
        elif start > target and not shared.quantize_weight_in_forward:
            _period(widths.params.quantization_period, start, target, (*at, "quantization_period"), findings)
        if start > 32:
            findings.problem((*at, "start_bits"), f"{start}: weights have at most 32 bits")
        common: Path = (*AT, "weight_quantization", "shared_parameters")
        for key, only in (("quantization_type", "symmetric"), ("rounding", "nearest")):
            if target < LEAST_LEVELS and getattr(shared, key) != only:
                findings.problem(
                    (*at, "target_bits"),
                    f"{target}: below {LEAST_LEVELS} bits a weight is a sign, so {key} must be {only}",
                    (*common, key),
                )
