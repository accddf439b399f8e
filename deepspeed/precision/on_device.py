"""Builds modules with a chosen dtype on a chosen device: :class:`OnDevice`."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch


class OnDevice:
    """Sets the default device, and the dtype of floating tensors, inside the context.

    With ``device="meta"`` a model of any size is built without memory: its parameters have shapes but no values.

    Raises:
        ValueError: ``dtype`` is not a floating dtype.

    Examples:
        >>> with OnDevice(dtype=torch.bfloat16, device="meta"):
        ...     layer = torch.nn.Linear(8, 8)
        >>> layer.weight.dtype, layer.weight.device.type
        (torch.bfloat16, 'meta')
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True) -> None:
        if enabled and not dtype.is_floating_point:
            raise ValueError(f"OnDevice(dtype={dtype}): must be a floating dtype; use for example torch.bfloat16")
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._exits: list[ExitStack] = []

    def __enter__(self) -> OnDevice:
        stack = ExitStack()
        if self.enabled:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            stack.enter_context(torch.device(self.device))
        self._exits.append(stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.pop().close()
