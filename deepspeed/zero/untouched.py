"""Keeps the tensor constructors that ``zero.Init`` replaces away from this package's own tensors."""

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
    """Returns whether constructors must do nothing of their own."""
    return _depth > 0
