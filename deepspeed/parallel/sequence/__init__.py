"""Sequence parallelism: ranks that hold different parts of the same sequences."""
