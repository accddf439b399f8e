"""The place where inputs enter column-parallel layers: layers with one input sum its gradient once."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.comm.transports.channel import Channel
from deepspeed.parallel.tensor.regions import SharedInput, enter_shared


class SharedInputs:
    """Remembers the latest input, so that query, key and value, or gate and up, which follow each other, share it.

    Args:
        channel: The ranks.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._latest: tuple[torch.Tensor, int, torch.dtype | None, torch.Tensor, SharedInput] | None = None

    def __deepcopy__(self, memo: Any) -> SharedInputs:
        return SharedInputs(self._channel)

    def enter(
        self, values: torch.Tensor, dtype: torch.dtype | None, name: str
    ) -> tuple[torch.Tensor, SharedInput | None]:
        """Returns what a layer works on, and where it adds the gradient of its input.

        Args:
            values: The input, ``[..., in]``.
            dtype: Dtype to cast it to; None: its own.
            name: Name of the layer.

        Returns:
            The input, and None if it needs no gradient.
        """
        if not (torch.is_grad_enabled() and values.requires_grad):
            self._latest = None
            return (values if dtype is None else values.to(dtype)), None
        if self._latest is not None:
            known, version, wanted, entered, shared = self._latest
            if known is values and version == values._version and wanted == dtype and shared.is_open:
                return entered, shared
        shared = SharedInput(self._channel, f"the gradient of the input of {name}", self._forget)
        entered = enter_shared(values if dtype is None else values.to(dtype), shared)
        self._latest = values, values._version, dtype, entered, shared
        return entered, shared

    def _forget(self, shared: SharedInput) -> None:
        """Its backward has begun: the activation may go."""
        if self._latest is not None and self._latest[4] is shared:
            self._latest = None
