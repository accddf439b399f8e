"""Excludes this package's own tensors from the constructors that ``zero.Init`` replaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


@contextmanager
def untouched() -> Iterator[None]:
    """Keeps ``zero.Init`` from changing the dtype and device of tensors that are made inside the context."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_untouched() -> bool:
    """Returns whether replaced constructors must behave like the original ones."""
    return _depth > 0
