"""Linear layers whose weights are kept in 8 or 4 bits: the formats, and the product with activations."""

from deepspeed.ops.packed_linear.codes import GroupCodes
from deepspeed.ops.packed_linear.format import PackedFormat
from deepspeed.ops.packed_linear.formats import packed_format
from deepspeed.ops.packed_linear.product import packed_linear

__all__ = ["GroupCodes", "PackedFormat", "packed_format", "packed_linear"]
