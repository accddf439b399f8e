"""What a scheduler asks before it starts an elastic run."""

from __future__ import annotations


def is_torch_elastic_compatible() -> bool:
    """Returns True: every supported torch has the elastic agent (1.11 and newer)."""
    return True
