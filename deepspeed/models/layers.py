"""Recognises layers of the Transformers library and reads their properties, without importing the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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


def mark_initialized(tensor: torch.Tensor) -> None:
    """Marks a parameter or buffer, of any shape, as one that has its values: the library does not initialise it."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def modules_in_fp32(model: Any) -> list[str]:
    """Returns parts of the names of modules that a model wants to keep in fp32."""
    lists = (getattr(model, name, None) or () for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    return sorted({part for parts in lists for part in parts})


def queries_per_key(attention: Any) -> int:
    """Returns the number of query heads of an attention module that share a key head; 1 where it does not say."""
    return int(getattr(attention, "num_key_value_groups", 1))
