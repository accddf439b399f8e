"""Saves attention's result for backward only once: in the layout by tokens of the next layer, not also by heads.

The backward of attention reads the result by heads, that of the next projection reads it by tokens: the same values
before and after an exchange. Only the latter is saved; backward repeats the exchange to get the former. Results are
bit-equal, as an exchange only moves values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed.errors import CallOrderError
from deepspeed.zero.gather.handles import handing_on


class _Saved:
    """Holds a tensor that attention saves for autograd, or how to compute it again."""

    __slots__ = ("again", "packed", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, packed: Any) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.packed = packed
        self.version = tensor._version
        self.again: Callable[[], torch.Tensor] | None = None


class SavedResult:
    """Replaces, for one call of attention, the saved result by a later recomputation.

    If the program has its own saved-tensor hooks (non-reentrant checkpointing, offload), nothing is changed.
    """

    def __init__(self) -> None:
        self._saved: list[_Saved] = []

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Observes the tensors that attention saves. To be entered around the call."""
        outer = handing_on()
        if outer is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            yield
            return
        pack, unpack = outer

        def packs(tensor: torch.Tensor) -> _Saved:
            saved = _Saved(tensor, pack(tensor))
            self._saved.append(saved)
            return saved

        def unpacks(saved: _Saved) -> torch.Tensor:
            if saved.again is not None:
                return saved.again()
            found = unpack(saved.packed)
            if found._version != saved.version and found is saved.packed:
                raise CallOrderError(
                    f"backward needs a tensor of shape {tuple(found.shape)} as attention saved it, but it was changed "
                    "in place since; do that out of place"
                )
            return found

        with torch.autograd.graph.saved_tensors_hooks(packs, unpacks):
            yield

    def became(
        self, result: torch.Tensor, by_tokens: torch.Tensor, exchanged: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Releases what attention returned, by heads; ``exchanged`` computes it from ``by_tokens``. Both are 4-D."""
        saved, self._saved = self._saved, []
        if result.untyped_storage().nbytes() != result.numel() * result.element_size() or result._version:
            return  # the memory holds more than the result, or was changed since it was saved
        kept, version = by_tokens.detach(), by_tokens._version
        size, stride, device, dtype = result.size(), result.stride(), result.device, result.dtype

        def again(view: tuple[torch.Size, tuple[int, ...]]) -> torch.Tensor:
            if kept._version != version:
                raise CallOrderError(
                    "recompute_exchange: attention's result was changed in place behind attention, and backward needs "
                    "it as it was; change it out of place, or leave recompute_exchange out"
                )
            with torch.no_grad():
                made = exchanged(kept)
                strides = zip(made.shape, made.stride(), stride, strict=True)  # those of axes of length 1 do not count
                if made.storage_offset() or any(own != wanted for extent, own, wanted in strides if extent > 1):
                    made = torch.empty_strided(size, stride, dtype=dtype, device=device).copy_(made)
                return made.as_strided(*view, 0)

        for each in saved:
            tensor = each.tensor
            each.tensor = None
            if tensor is not None and tensor.numel() == result.numel() and _place(tensor) == _place(result):
                each.again = functools.partial(again, (tensor.size(), tensor.stride()))
                each.packed = None


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.data_ptr(), tensor.dtype
