"""Counts the bytes of operation results that are still referenced."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = ("copy_", "cat", "clone", "stack", "_to_copy")  # operations that only move data


class Alive(TorchDispatchMode):
    """Records the results of all operations inside the context, those of backward too.

    Attributes:
        copied: Bytes that :data:`COPIES` have written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            # Storage that cannot be resized is memory that ranks share; all layers use the same.
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().resizable():
                reference = StorageWeakRef(tensor.untyped_storage())
                self._made[reference.cdata] = reference, tensor.untyped_storage().nbytes()
        if func.overloadpacket.__name__ in COPIES:
            self.copied += out.nbytes
        return out

    def nbytes(self, *without: torch.Tensor) -> int:
        """Returns the bytes that are referenced now, without the storage of the tensors in ``without``."""
        gc.collect()
        left_out = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in without}
        return sum(
            nbytes for key, (reference, nbytes) in self._made.items() if key not in left_out and not reference.expired()
        )
