"""Linear layers whose weights are kept in 8 or 4 bits: the formats, and the product with activations."""

from deepspeed.ops.packed_linear.formats import GroupCodes, PackedFormat, packed_format, packed_linear

__all__ = ["GroupCodes", "PackedFormat", "packed_format", "packed_linear"]
