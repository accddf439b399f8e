"""Weights of few bits for parts of a model, by the section ``weight_quantization``."""

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
    """Quantises what a training configuration requests. Every rank must call it.

    Parameters that ``zero.Init`` has sharded are gathered one layer at a time, and what is kept of them is sharded
    again, so that no rank ever holds more of the model than its share and a layer.

    Args:
        model: Layers that are quantised already stay as they are.
        section: None: nothing.

    Raises:
        DeepSpeedConfigError: The section cannot be used; nothing is changed.
    """
    if section is None or not section.enabled:
        return
    parts: dict[str, Mapping[str, Any]] = {part: group.model_dump() for part, group in section.post_init_quant.items()}
    at_first = section.quantized_initialization.model_dump(exclude_unset=True)
    if at_first and parts:
        raise DeepSpeedConfigError(
            "weight_quantization: quantized_initialization means all layers, post_init_quant some; give one of them"
        )
    for report in quantize_parts(model, {"": at_first} if at_first else parts):
        log_dist(f"weight_quantization: {report.line()}", ranks=[0])


def quantize_parts(model: nn.Module, parts: Mapping[str, Mapping[str, Any]]) -> list[QuantizationReport]:
    """Quantises the linear layers of ``model`` whose names have one of the parts, in place.

    Args:
        model: Any model, see :func:`~deepspeed.linear.quantize_model`.
        parts: Part of a name -> ``num_bits`` (8 or 4), ``group_size``, ``group_dim``, ``symmetric``.

    Returns:
        Sizes and errors, one report per part.

    Raises:
        DeepSpeedConfigError: A layer has two of the parts in its name, or a setting has no format; nothing is changed.
    """
    check_parts(model, parts)
    return [
        quantize_model(model, bits=requested.get("num_bits") or 8, group_size=_group_size(requested), only=(part,))
        for part, requested in parts.items()
    ]


def check_parts(model: nn.Module, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises for requests that :func:`quantize_parts` cannot do.

    Raises:
        DeepSpeedConfigError: A request is not possible.
    """
    for name, module in model.named_modules():
        meant = [part for part in parts if part in name]
        if len(meant) > 1 and (isinstance(module, nn.Linear) or is_conv1d(type(module))):
            raise DeepSpeedConfigError(
                f"post_init_quant: {' and '.join(map(repr, meant))} both match the layer {name!r}; let only one match"
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
            raise DeepSpeedConfigError(f"{where}: num_bits {requested['num_bits']}; expected 4 or 8")
        if requested.get("group_dim") not in (None, 1):
            raise DeepSpeedConfigError(
                f"{where}: group_dim {requested['group_dim']}; expected 1, groups are along the input features"
            )
        if requested.get("num_bits") == 4:
            try:
                packed_format(4, _group_size(requested))
            except ValueError as error:
                raise DeepSpeedConfigError(f"{where}: {error}") from error


def _group_size(requested: Mapping[str, Any]) -> int:
    given = requested.get("group_size")
    if given is not None and (requested.get("num_bits") or 8) == 8:
        log_dist("weight_quantization: group_size has no effect at 8 bits, where every row has a scale", ranks=[0])
        return 64
    return given or 64
