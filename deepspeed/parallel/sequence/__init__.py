"""Sequence parallelism: ranks hold different parts of the same sequences."""
