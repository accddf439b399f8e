"""Tensor parallelism: divides the weights of layers over ranks that see the same samples."""
