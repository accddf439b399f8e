"""Sequence parallelism: divides sequences over ranks, and exchanges heads or keys and values for attention."""
