"""Stochastic rounding of fp32 results to 16 bits, which does not depend on how a parameter is cut.

A value is rounded to one of its two neighbors in the narrow dtype. The probability of the upper one is the distance
from the lower one, divided by the distance of the neighbors, so the result is unbiased. Rounding to nearest would lose
every update smaller than half that distance.

The random bits of an element depend on the number of the update, the name of its parameter, its index in the flattened
parameter, and what is rounded (the master or one of its states). So they are equal for every ZeRO stage, number of
ranks, offload tier and device. They come from one table per update, which every block of a parameter reads from a
different offset.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.flat import FlatUpdate, scratch

#: Entries of the table, and elements of a block.
_BLOCK = 1 << 16

_MASK = 0xFFFFFFFF

#: Below this fp16 has a constant distance between neighbors, 2 to the power of -24.
_FP16_LEAST_NORMAL = 2.0**-14

_tables: dict[torch.device, tuple[int, Tensor]] = {}


@dataclass(frozen=True)
class ParameterInterval:
    """A contiguous interval of one parameter in a run."""

    name: str  # the name of the parameter
    first: int  # index of the first element in the flattened parameter
    start: int  # index of the first element in the run
    numel: int  # number of elements


class ElementRounding:
    """Rounds the results of one update of a run; ``update`` is equal on all ranks, ``intervals`` ascend."""

    def __init__(self, update: int, intervals: Sequence[ParameterInterval]) -> None:
        self._update = update
        self._intervals = [(zlib.crc32(interval.name.encode()), interval) for interval in intervals]

    def store(self, wide: Tensor, narrow: Tensor, *, role: str, start: int) -> None:
        """Rounds ``wide`` into ``narrow``.

        Args:
            wide: 1-D, fp32; not changed. Non-finite values stay non-finite.
            narrow: 1-D, of the same length, bf16 or fp16; other dtypes are rounded to nearest.
            role: Name of what is rounded: ``master``, or one for each state.
            start: Index of the first element in the run.
        """
        if narrow.dtype not in (torch.bfloat16, torch.float16) or wide.dtype is not torch.float32:
            narrow.copy_(wide)
            return
        is_bf16 = narrow.dtype is torch.bfloat16
        noise = self._noise(role, start, wide, wide.view(torch.int32) if is_bf16 else None)
        # bf16 is the upper half of fp32: noise is added to the lower half, which is cut off.
        rounded = noise.bitwise_and_(-(1 << 16)).view(torch.float32) if is_bf16 else _to_fp16(wide, noise)
        # Adding noise to a NaN could overflow into its sign bit. On the host, checking for NaN first is cheaper; on a
        # device, the check would make the host wait.
        if wide.device.type != "cpu" or not math.isfinite(float(wide.sum())):
            rounded = torch.where(wide.isnan(), wide, rounded)
        narrow.copy_(rounded)

    def _noise(self, role: str, start: int, like: Tensor, base: Tensor | None) -> Tensor:
        """Returns 16 random bits for each element from ``start`` on, 1-D int32 as long as ``like``, plus ``base``."""
        numel, table = like.numel(), _table(self._update, like.device)
        noise = scratch("rounding", numel, torch.int32, like.device)
        seed, filled = zlib.crc32(role.encode()) ^ _mixed(self._update), 0
        for name, interval in self._intervals:
            lower, upper = max(interval.start, start), min(interval.start + interval.numel, start + numel)
            while lower < upper:
                block, within = divmod(interval.first + lower - interval.start, _BLOCK)
                count = min(upper - lower, _BLOCK - within)
                begin = within + _mixed(seed ^ _mixed(name + block)) % _BLOCK
                part, bits = slice(lower - start, lower - start + count), table[begin : begin + count]
                if base is None:
                    noise[part].copy_(bits)
                else:
                    torch.add(base[part], bits, out=noise[part])
                lower, filled = lower + count, filled + count
        if filled != numel:
            raise ValueError(
                f"ElementRounding: {numel - filled} of {numel} elements of a run are in none of its intervals; pass "
                "intervals that cover the run"
            )
        return noise


def _to_fp16(wide: Tensor, noise: Tensor) -> Tensor:
    """Truncates 13 bits after adding noise; subnormal results are rounded with their constant spacing."""
    small = (wide * 2.0**24 + noise * 2.0**-16).floor_().mul_(2.0**-24)
    cut = noise.bitwise_right_shift_(3).add_(wide.view(torch.int32)).bitwise_and_(-(1 << 13)).view(torch.float32)
    return torch.where(wide.abs() < _FP16_LEAST_NORMAL, small, cut)


def _table(update: int, device: torch.device) -> Tensor:
    """Returns the table of an update, repeated once, so that a block can be read from any offset."""
    cached = _tables.get(device)
    if cached is not None and cached[0] == update:
        return cached[1]
    with torch.inference_mode(False):
        # In int64, since products of unsigned 32 bits are not defined on every device.
        bits = torch.arange(_BLOCK, dtype=torch.int64, device=device)
        bits = bits.mul_(0x9E3779B1).add_(_mixed(update ^ 0x5BD1E995)).bitwise_and_(_MASK)
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
            bits.bitwise_xor_(bits >> shift).mul_(factor).bitwise_and_(_MASK)
        table = (bits ^ (bits >> 15)).bitwise_right_shift_(16).to(torch.int32).repeat(2)
    _tables[device] = update, table
    return table


def _mixed(number: int) -> int:
    number &= _MASK
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        number = ((number ^ (number >> shift)) * factor) & _MASK
    return number ^ (number >> 15)


class NarrowStates:
    """A :class:`FlatUpdate` whose per-element states have the dtype of the master if that has 16 bits."""

    def __init__(self, inner: FlatUpdate) -> None:
        self._inner = inner

    def init_flat_state(self, param_group: dict[str, Any], master: Tensor, state: dict[str, Any]) -> None:
        """Adds to ``state`` what it lacks: tensors of shape and dtype of ``master`` (1-D), and the step counter."""
        present = {key for key, value in state.items() if value is not None}
        self._inner.init_flat_state(param_group, master, state)
        for key, value in state.items():
            if key not in present and isinstance(value, Tensor) and value.dim() and master.dtype.itemsize == 2:
                state[key] = value.to(master.dtype)

    def flat_update(
        self, param_group: dict[str, Any], master: Tensor, grad: Tensor, state: dict[str, Any], **options: Any
    ) -> None:
        """Runs one step on a run, 1-D, as :meth:`FlatUpdate.flat_update` of the inner update does."""
        self.init_flat_state(param_group, master, state)
        self._inner.flat_update(param_group, master, grad, state, **options)
