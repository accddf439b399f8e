"""Counts the memory of operation results that is still referenced."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = ("copy_", "cat", "clone", "stack", "_to_copy")


class Alive(TorchDispatchMode):
    """Watches the operations of its block, also those of backward in it.

    Attributes:
        copied: Bytes that operations wrote which only move.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            # What cannot be resized is not torch's: pages that ranks share, which are there once for all layers.
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().resizable():
                reference = StorageWeakRef(tensor.untyped_storage())
                self._made[reference.cdata] = reference, tensor.untyped_storage().nbytes()
        if func.overloadpacket.__name__ in COPIES:
            self.copied += out.nbytes
        return out

    def nbytes(self, *without: torch.Tensor) -> int:
        """Bytes that are alive now, but for the memory of some tensors."""
        gc.collect()
        left_out = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in without}
        return sum(
            nbytes for key, (reference, nbytes) in self._made.items() if key not in left_out and not reference.expired()
        )
