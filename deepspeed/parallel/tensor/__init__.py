"""Tensor parallelism: layers whose weights are cut over ranks that see the same samples."""
