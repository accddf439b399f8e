"""Recognizes layers of the Transformers library and reads their properties, without importing the library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def is_conv1d(kind: type) -> bool:
    """Returns whether a class is the library's ``Conv1D``: a linear layer with a weight ``[in, out]``."""
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_of_library(kind: type) -> bool:
    """Returns whether a class is one of the library's own."""
    return kind.__module__.startswith("transformers.")


def initializer_of(model: Any) -> Callable[..., Any] | None:
    """Returns the model's method that initializes one of its modules, buffers too; None if it has none."""
    method = getattr(model, "_init_weights", None)
    return method if callable(method) else None


def rope_types_of(module: Any) -> list[str]:
    """Returns the RoPE types of a rotary embedding, such as "dynamic"; empty for other modules."""
    kinds = getattr(module, "rope_type", None)
    return [kind for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]) if isinstance(kind, str)]


@contextmanager
def keep_rotary_frequencies(model: nn.Module) -> Iterator[None]:
    """Restores the dtypes of rotary frequencies at the end of the context, in which a model is cast.

    Positions are multiplied by them, so that rounding them to 16 bits turns late tokens by wrong angles. The library
    keeps them in fp32 when it loads a model in 16 bits.
    """
    found = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and is_of_library(type(module))
    ]
    yield
    for module, name, before in found:
        now = module._buffers.get(name)
        if now is not None and now.dtype != before.dtype:
            module._buffers[name] = before.to(now.device)


def mark_initialized(tensor: torch.Tensor) -> None:
    """Marks a parameter or buffer, of any shape, as initialized, so that the library keeps its values."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


_FP32_LISTS = {torch.float16: 2, torch.bfloat16: 1}  # how many of a model's two lists the library obeys


def modules_in_fp32(model: Any, dtype: torch.dtype = torch.float16) -> list[str]:
    """Returns parts of names ("norm", "mlp.gate") of modules that stay in fp32, more beside fp16 than beside bf16."""
    names = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")[: _FP32_LISTS.get(dtype, 0)]
    lists = (getattr(model, name, None) or () for name in names)
    return sorted({part for parts in lists for part in parts})


def lies_in(name: str, parts: Iterable[str]) -> bool:
    """Returns whether the name of a parameter or buffer contains one of ``parts``, such as "mlp.gate", whole."""
    return any(f".{part}." in f".{name}." for part in parts)


def queries_per_key(attention: Any) -> int:
    """Returns the number of query heads of an attention module that share a key head; 1 if it has no such number."""
    return int(getattr(attention, "num_key_value_groups", 1))
