"""Which formats of packed weights there are."""

from __future__ import annotations

from deepspeed.ops.packed_linear.format import PackedFormat
from deepspeed.ops.packed_linear.int4 import GROUP_SIZES, Int4Groups
from deepspeed.ops.packed_linear.int8 import Int8Rows


def packed_format(bits: int, group_size: int = 64) -> PackedFormat:
    """Returns the format for ``bits`` bits.

    Args:
        bits: 8 (one scale per output feature) or 4 (a scale and an offset per group of input features).
        group_size: Input features that share a scale, at 4 bits: 32, 64, 128 or 256.

    Raises:
        ValueError: There is no such format.
    """
    if bits == 8:
        return Int8Rows()
    if bits != 4:
        raise ValueError(f"weights of {bits} bits: there are formats of 8 and of 4 bits")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size {group_size} at 4 bits: choose one of {', '.join(map(str, GROUP_SIZES))}")
    return Int4Groups(group_size)
