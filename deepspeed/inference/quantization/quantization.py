"""Weights of few bits for parts of a model, as ``weight_quantization.post_init_quant`` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from deepspeed.config.sections.quantization import WeightQuantization
from deepspeed.config.single import parse_section
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.linear.quantize import QuantizationReport, quantize_model
from deepspeed.logging import log_dist


def quantize_parts(model: nn.Module, parts: Mapping[str, Mapping[str, Any]]) -> list[QuantizationReport]:
    """Quantises the linear layers of ``model`` whose names have one of the parts, in place.

    Args:
        model: As of :func:`~deepspeed.linear.quantize_model`.
        parts: Part of a name -> ``num_bits`` (8 or 4), ``group_size``, ``group_dim``, ``symmetric``.

    Returns:
        Sizes and errors, one report per part.

    Raises:
        DeepSpeedConfigError: A layer has two of the parts in its name, or a setting has no format; nothing is changed.
    """
    for name, module in model.named_modules():
        meant = [part for part in parts if part in name]
        if len(meant) > 1 and isinstance(module, nn.Linear):
            raise DeepSpeedConfigError(
                f"post_init_quant: the layer {name!r} is meant by {' and '.join(map(repr, meant))}; let one name it"
            )
    for part, asked in parts.items():
        if asked.get("symmetric"):
            raise DeepSpeedConfigError(f"post_init_quant.{part}: symmetric true; only false works")
        if asked.get("group_dim") not in (None, 1):
            raise DeepSpeedConfigError(
                f"post_init_quant.{part}: group_dim {asked['group_dim']}; groups lie along the input features, which "
                "is group_dim 1"
            )
    return [
        quantize_model(model, bits=asked.get("num_bits") or 8, group_size=_group_size(asked), only=(part,))
        for part, asked in parts.items()
    ]


def _group_size(asked: Mapping[str, Any]) -> int:
    given = asked.get("group_size")
    if given is not None and (asked.get("num_bits") or 8) == 8:
        log_dist("post_init_quant: group_size has no effect at 8 bits, where every row has a scale", ranks=[0])
        return 64
    return given or 64


def _init_group_wise_weight_quantization(model: nn.Module, ds_config: Any) -> nn.Module:
    """Quantises what ``weight_quantization.post_init_quant`` of a training configuration names, and returns the model.

    Raises:
        DeepSpeedConfigError: The section cannot be used.
    """
    section = parse_section(ds_config, "weight_quantization")
    if isinstance(section, WeightQuantization) and section.enabled:
        parts = {part: group.model_dump() for part, group in section.post_init_quant.items()}
        for report in quantize_parts(model, parts):
            log_dist(report.line(), ranks=[0])
    return model
