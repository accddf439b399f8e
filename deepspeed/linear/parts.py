"""Quantizes the weights of parts of a model, by the section ``weight_quantization``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from deepspeed.config.sections.quantization import WeightQuantization
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.linear.quantize import QuantizationReport, quantize_model
from deepspeed.logging import log_dist
from deepspeed.models.layers import is_conv1d
from deepspeed.ops.packed_linear import packed_format

_KEYS = {"num_bits", "group_size", "group_dim", "symmetric"}


def quantize_as_configured(model: nn.Module, section: WeightQuantization | None) -> None:
    """Quantizes the layers that a training configuration selects, in place. Every rank must call it.

    Parameters that ``zero.Init`` has sharded are gathered one layer at a time, and the codes and scales are sharded, so
    that no rank ever holds more of the model than its share and one layer.

    Args:
        model: Layers that are quantized already are not changed.

    Raises:
        DeepSpeedConfigError: The section cannot be used with this model; nothing is changed.
    """
    if section is None or not section.enabled:
        return
    parts: dict[str, Mapping[str, Any]] = {part: group.model_dump() for part, group in section.post_init_quant.items()}
    for_all = section.quantized_initialization.model_dump(exclude_unset=True)
    if for_all and parts:
        raise DeepSpeedConfigError(
            "weight_quantization: quantized_initialization selects all layers, post_init_quant some of them; give one"
        )
    for report in quantize_parts(model, {"": for_all} if for_all else parts):
        log_dist(f"weight_quantization: {report.line()}", ranks=[0])


def quantize_parts(model: nn.Module, parts: Mapping[str, Mapping[str, Any]]) -> list[QuantizationReport]:
    """Quantizes the linear layers whose names contain a key of ``parts``, in place; returns sizes and errors by part.

    Args:
        parts: Settings by a part of names: ``num_bits`` (8 or 4), ``group_size``, ``group_dim``, ``symmetric``.

    Raises:
        DeepSpeedConfigError: See :func:`check_parts`; nothing is changed.
    """
    check_parts(model, parts)
    return [
        quantize_model(model, bits=requested.get("num_bits") or 8, group_size=_group_size(requested), only=(part,))
        for part, requested in parts.items()
    ]


def check_parts(model: nn.Module, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks the arguments of :func:`quantize_parts`.

    Raises:
        DeepSpeedConfigError: The name of a layer contains two of the parts, no name contains one, or there is no format
            with these settings.
    """
    for name, module in model.named_modules():
        matched = [part for part in parts if part in name]
        if len(matched) > 1 and (isinstance(module, nn.Linear) or is_conv1d(type(module))):
            raise DeepSpeedConfigError(
                f"post_init_quant: {' and '.join(map(repr, matched))} both match the layer {name!r}; let only one match"
            )
    names = [name for name, _ in model.named_parameters()]
    for part, requested in parts.items():
        where = f"post_init_quant.{part}" if part else "quantized_initialization"
        if not isinstance(requested, Mapping) or (unknown := sorted(set(requested) - _KEYS)):
            found = repr(requested) if not isinstance(requested, Mapping) else ", ".join(unknown)
            raise DeepSpeedConfigError(f"{where}: expected an object with {', '.join(sorted(_KEYS))}; found {found}")
        if not any(part in name for name in names):
            raise DeepSpeedConfigError(
                f"{where}: no parameter of {type(model).__name__} has {part!r} in its name; "
                "correct the entry, or leave it out"
            )
        if requested.get("symmetric"):
            raise DeepSpeedConfigError(f"{where}.symmetric: expected false, found true; leave it out")
        if requested.get("num_bits") not in (None, 4, 8):
            raise DeepSpeedConfigError(f"{where}.num_bits: expected 4 or 8, found {requested['num_bits']!r}; use one")
        if requested.get("group_dim") not in (None, 1):
            raise DeepSpeedConfigError(
                f"{where}.group_dim={requested['group_dim']!r}: expected 1, as groups are along the input features; "
                "leave it out"
            )
        if requested.get("num_bits") == 4:
            try:
                packed_format(4, _group_size(requested))
            except ValueError as error:
                raise DeepSpeedConfigError(f"{where}: {error}") from error


def _group_size(requested: Mapping[str, Any]) -> int:
    size = requested.get("group_size")
    if size is not None and (requested.get("num_bits") or 8) == 8:
        log_dist(
            "weight_quantization: group_size has no effect at 8 bits, where every row has its own scale", ranks=[0]
        )
        return 64
    return size or 64
