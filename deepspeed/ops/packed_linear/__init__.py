"""Linear layers whose weights are stored in few bits: the formats, and the product with activations."""

from deepspeed.ops.packed_linear.formats import GroupCodes, PackedFormat, packed_format, packed_linear

__all__ = ["GroupCodes", "PackedFormat", "packed_format", "packed_linear"]
