"""Makes inputs for a Transformers model from the sizes in its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.models.configurations import text_config, vocabulary_of


def small_inputs(model: nn.Module, rows: int, length: int) -> dict[str, Any] | None:
    """Returns a small batch with the same values on all ranks; None where it is not known what the model takes.

    Args:
        model: Any module; the result is None for one that is not of the library.
        rows: Samples.
        length: Tokens of a sequence.
    """
    config = getattr(model, "config", None)
    name = main_input_of(model)
    if config is None or name is None:
        return None
    vocabulary = vocabulary_of(config)
    if name == "input_ids" and vocabulary is not None:
        ids = (torch.arange(rows * length).view(rows, length) * 7 + 3) % vocabulary
        padding = getattr(text_config(config), "pad_token_id", None)
        ids = torch.where(ids == padding, (ids + 1) % vocabulary, ids) if isinstance(padding, int) else ids
        inputs: dict[str, Any] = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids.flip(0)
    elif name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        shape = (rows, getattr(config, "num_channels", 3), config.image_size, config.image_size)
        inputs = {"pixel_values": torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)}
    else:
        return None
    parameters = inspect.signature(model.forward).parameters.values()
    if getattr(text_config(config), "use_cache", False) and any(
        one.name == "use_cache" or one.kind is one.VAR_KEYWORD for one in parameters
    ):
        inputs["use_cache"] = False  # some families have no cache that fits a model of linear attention only
    weight = next(model.parameters())
    return {
        key: value.to(weight.device, weight.dtype if value.is_floating_point() else None)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in inputs.items()
    }


def main_input_of(model: Any, otherwise: str | None = None) -> str | None:
    """Returns the name of a model's first input, such as "input_ids"; ``otherwise`` where it has no name."""
    return getattr(model, "main_input_name", otherwise)


def tokens_in(model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> int | None:
    """Returns how many tokens a forward with these arguments gets; None where it does not get them as integers."""
    name = main_input_of(model)
    ids = named.get(name, inputs[0] if inputs else None) if name is not None else None
    return ids.numel() if isinstance(ids, torch.Tensor) and not ids.is_floating_point() else None


def image_shape_of(config: Any) -> tuple[int, ...] | None:
    """Returns ``(channels, height, width)`` of the images that a model takes; None where the configuration has none."""
    sizes: Any = getattr(config, "vision_config", config)
    extent = getattr(sizes, "image_size", None)
    if not isinstance(extent, (int, tuple, list)):
        return None
    return (getattr(sizes, "num_channels", 3), *((extent, extent) if isinstance(extent, int) else extent))


def spectrum_shape_of(config: Any) -> tuple[int, int] | None:
    """Returns ``(bins, frames)`` of the sounds that a model takes; None where the configuration has none."""
    if not hasattr(config, "num_mel_bins") or not hasattr(config, "max_source_positions"):
        return None
    return config.num_mel_bins, 2 * config.max_source_positions
