"""A copy of a rank's part of a checkpoint in host memory, which is written while training goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.offload.pinned import may_pin, page_buffer

_ALIGNMENT = 64  # bytes, so that every tensor begins on a cache line


class HostCopy:
    """Copies tensors into host memory.

    What is on a device goes into one page-locked buffer of the exact size, which is kept for the next copy of that
    size: torch's allocator would round every tensor up to a power of two and keep it for ever.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are kept for the next copy."""
        return 0 if self._buffer is None else self._buffer.numel()

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns copies with the shapes and dtypes of ``tensors``; those of the last call are overwritten.

        Waits until the device has finished.
        """
        places: dict[int, int] = {}
        size = 0
        for number, tensor in enumerate(tensors):
            if tensor.device.type != "cpu" and tensor.numel():
                places[number] = size
                size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if self._buffer is None or self._buffer.numel() != size:
            self._buffer = None  # before the next one is taken
            self._buffer = page_buffer(size, pin=may_pin(True)) if size else None
        copies = []
        for number, tensor in enumerate(tensors):
            if number in places:
                assert self._buffer is not None
                start, nbytes = places[number], tensor.numel() * tensor.element_size()
                held = self._buffer[start : start + nbytes].view(tensor.dtype).view(tensor.shape)
            else:
                held = torch.empty(tensor.shape, dtype=tensor.dtype)
            copies.append(held.copy_(tensor.detach(), non_blocking=True))
        get_accelerator().synchronize()
        return copies

    def free(self) -> None:
        """Gives the buffer back."""
        self._buffer = None
