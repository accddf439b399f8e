"""Detects which modules are layers of the Transformers library, from their classes and without importing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_conv1d(kind: type) -> bool:
    """Returns whether a class is the library's ``Conv1D``: a linear layer with a weight ``[in, out]``."""
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_of_library(kind: type) -> bool:
    """Returns whether a class is one of the library's own."""
    return kind.__module__.startswith("transformers.")


def initialiser_of(model: Any) -> Callable[..., Any] | None:
    """Returns the method by which a model gives one of its modules first values, buffers too; None without one."""
    method = getattr(model, "_init_weights", None)
    return method if callable(method) else None


def rope_types_of(module: Any) -> list[str]:
    """Returns the kinds of frequencies that a rotary embedding has, such as "dynamic"; empty for other modules."""
    kinds = getattr(module, "rope_type", None)
    return [kind for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]) if isinstance(kind, str)]
