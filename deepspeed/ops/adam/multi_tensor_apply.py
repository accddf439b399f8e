"""Calls an operator on lists of tensors, as optimizers of programs do with operators of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class MultiTensorApply:
    """Passes its chunk size to an operator, with the caller's arguments."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        """Returns ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
