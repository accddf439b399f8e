"""Quantizes an existing model, under the import path of upstream."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.config.parsing import parse_section
from deepspeed.config.sections.quantization import WeightQuantization
from deepspeed.linear.parts import quantize_as_configured


def _init_group_wise_weight_quantization(model: nn.Module, ds_config: Any) -> nn.Module:
    """Quantizes what ``weight_quantization`` of a training configuration names, and returns the model.

    Raises:
        DeepSpeedConfigError: The section cannot be used.
    """
    section = parse_section(ds_config, "weight_quantization")
    quantize_as_configured(model, section if isinstance(section, WeightQuantization) else None)
    return model
