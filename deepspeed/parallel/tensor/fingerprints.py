"""Numbers that tell tensors apart, computed where the tensors are."""

from __future__ import annotations

import zlib

import torch

WORDS = 1 << 16  # 8-byte words that are weighted one by one; longer tensors repeat the weights
_TAIL = -7046029254386353131  # odd, for the bytes behind the last whole word


class Fingerprints:
    """Makes fingerprints. Equal tensors have equal ones on every device; arithmetic is that of int64, which wraps."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(20)
        weights = torch.randint(1, 1 << 62, (WORDS,), generator=generator).bitwise_or_(1)
        self._weights = {weights.device: weights}

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a number that differs with the shape, the dtype and, all but surely, with any byte.

        The host waits for the device only where it is the first tensor of that device.

        Args:
            value: Strided.

        Returns:
            0-dim int64 on the device of ``value``.
        """
        data = value.detach().contiguous().view(-1)
        data = data.view(torch.uint8) if data.dtype is not torch.bool else data.to(torch.uint8)
        whole = data.numel() // 8 * 8
        tail = data.new_zeros(8)
        tail[: data.numel() - whole].copy_(data[whole:])
        total = tail.view(torch.int64)[0] * _TAIL
        if whole:
            words = data[:whole].clone().view(torch.int64) if data.data_ptr() % 8 else data[:whole].view(torch.int64)
            weights = self._weights_on(value.device)
            for number, part in enumerate(words.split(WORDS)):
                total = total + (part * weights[: part.numel()]).sum() * (2 * number + 1)
        return total + zlib.crc32(f"{tuple(value.shape)}{value.dtype}".encode())

    def _weights_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._weights:
            self._weights[device] = self._weights[torch.device("cpu")].to(device)
        return self._weights[device]
