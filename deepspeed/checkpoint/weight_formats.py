"""The forms in which weights leave an engine for a server: a dtype, or eight bits with scales beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

BLOCK = 128
"""Sides of the blocks of ``float8_block128``, as DeepSeek-V3's files have them."""


class WeightInfo(NamedTuple):
    """A tensor that an export yields."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


def float8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds weights to float8 with a scale for each block of 128 x 128; ragged edges are blocks of their own.

    Args:
        weight: ``[..., out, in]``.

    Returns:
        ``float8_e4m3fn`` of the same shape, and fp32 ``[..., ceil(out / 128), ceil(in / 128)]``: the greatest
        magnitude of the block / 448. The product of both is the weight.
    """
    *_, rows, columns = weight.shape
    padded = pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., rows, 128, columns, 128]
    scales = blocks.abs().amax((-3, -1)) / torch.finfo(torch.float8_e4m3fn).max
    divisors = scales.masked_fill(scales == 0, 1.0)[..., :, None, :, None]
    rounded = (blocks / divisors).to(torch.float8_e4m3fn).flatten(-2).flatten(-3, -2)
    return rounded[..., :rows, :columns].contiguous(), scales


def int8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds weights ``[..., out, in]`` to int8; fp32 scales ``[..., out, 1]`` are a row's greatest magnitude / 127."""
    values = weight.float()
    scales = values.abs().amax(-1, keepdim=True) / 127
    return (values / scales.masked_fill(scales == 0, 1.0)).round_().to(torch.int8), scales


FORMATS: dict[str, tuple[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]] = {
    "float8_block128": ("weight_scale_inv", float8_blocks),
    "int8": ("weight_scale", int8_rows),
}
"""What the scales of a format are called beside a weight, and the function that makes both."""


def products_of(model: nn.Module, head: nn.Module | None) -> set[str]:
    """Returns the weights of linear layers but the head, and stacks of experts, by name: what formats round."""
    kept = getattr(head, "weight", None)
    found = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            shape = getattr(parameter, "ds_shape", parameter.shape)  # whole, also of parameters that are sharded now
            is_stack = len(shape) == 3 and not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
            if parameter is not kept and (is_stack or (isinstance(module, nn.Linear) and name.endswith("weight"))):
                found.add(name)
    return found


def in_format(
    name: str, values: torch.Tensor, form: torch.dtype | str | None, rounded: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what stands for one weight.

    Args:
        form: A dtype, a name of :data:`FORMATS`, or None for the values as they are.
        rounded: The weights that a format rounds.
    """
    if isinstance(form, str) and name in rounded:
        suffix, function = FORMATS[form]
        codes, scales = function(values)
        yield name, codes
        yield f"{name.removesuffix('weight')}{suffix}" if name.endswith("weight") else f"{name}_{suffix}", scales
    else:
        is_cast = isinstance(form, torch.dtype) and values.is_floating_point()
        yield name, values.detach().to(form if is_cast else values.dtype, copy=True)  # type: ignore[arg-type]
