"""Stores weights of linear layers in few bits, and multiplies activations by them."""

from deepspeed.ops.packed_linear.formats import GroupCodes, PackedFormat, packed_format, packed_linear

__all__ = ["GroupCodes", "PackedFormat", "packed_format", "packed_linear"]
