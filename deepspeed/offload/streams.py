"""Copies between device and host concurrently with the computation.

Each direction has its own stream, so that gradients to the host do not queue behind parameters to the device. If the
device computes in host memory, every copy is complete when the call returns, and waits do nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator


class CopyHandle:
    """A copy in flight. ``event``: event recorded after the copy; None if it is complete."""

    def __init__(self, event: Any = None) -> None:
        self._event = event

    @property
    def is_done(self) -> bool:
        """Whether the copy is known to be complete; does not query the device."""
        return self._event is None

    def wait(self) -> None:
        """Makes later work of the current stream wait for the copy; does not block the host."""
        event = self._event
        if event is not None:
            get_accelerator().current_stream().wait_event(event)

    def will_arrive(self) -> bool:
        """Returns True: the transfer depends on no other rank."""
        return True

    def has_arrived(self) -> bool:
        """Returns whether the copy is complete, by a query of the device."""
        event = self._event
        return event is None or bool(event.query())

    def wait_on_host(self) -> None:
        """Blocks until the copy is complete: the host may then read the target and write the source."""
        event = self._event  # several threads may wait
        if event is not None:
            event.synchronize()
            self._event = None


class CopyStream:
    """Queues copies on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None if get_accelerator().shares_host_memory(device) else get_accelerator().Stream()

    def context(self) -> AbstractContextManager[Any]:
        """Returns a context whose work runs on this stream, after all work queued on the current stream so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(get_accelerator().current_stream())
        return get_accelerator().stream(self._stream)

    def wait_for(self, other: CopyStream) -> None:
        """Makes later copies wait for all copies of ``other`` so far. Does not block the host."""
        if self._stream is not None and other._stream is not None:
            self._stream.wait_stream(other._stream)

    def wait_on_host(self) -> None:
        """Blocks until every copy queued so far is complete."""
        if self._stream is not None:
            self._stream.synchronize()

    def keep(self, tensor: torch.Tensor) -> None:
        """Keeps the memory of a device tensor from being reused before the copies queued so far are complete."""
        if self._stream is not None and tensor.device.type != "cpu":
            tensor.record_stream(self._stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, keeps: bool = True) -> CopyHandle:
        """Starts to copy ``source`` to ``target``, of equal shapes; inside or outside :meth:`context`.

        Neither tensor may be changed until the copy is complete. Without ``keeps`` the caller holds both until the
        stream on which the device's tensor was made waits for the copy, or calls :meth:`keep`.
        """
        if self._stream is None:
            target.copy_(source)
            return CopyHandle()
        with self.context():
            target.copy_(source, non_blocking=True)
            for tensor in (target, source) if keeps else ():
                self.keep(tensor)
            event = get_accelerator().Event()
            event.record(self._stream)
        return CopyHandle(event)
