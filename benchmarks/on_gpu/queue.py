"""A process group of ranks that do not exist: its transfers keep a CUDA stream busy as long as they would take."""

from __future__ import annotations

from typing import Any

import torch

CYCLES = 1.7e9  # of the device per second; torch.cuda._sleep takes cycles


class QueuedWork:
    """A transfer on a stream of its own."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self, timeout: Any = None) -> None:
        """Puts the current stream behind the transfer."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        """Returns whether the transfer is over."""
        return self._event is None or bool(self._event.query())


class QueuedGroup:
    """What stands beneath a native transport (``deepspeed.comm.transports.native``) in the place of NCCL's group.

    Large buffers are left alone. Small ones are filled with this rank's own values, as if all ranks had the same.

    Args:
        stream: Where transfers are queued; None: nothing is, as on a CPU.
        rate: Bytes per second.
    """

    def __init__(self, stream: Any, rate: float) -> None:
        self._stream = stream
        self._rate = rate

    def _queue(self, nbytes: int) -> QueuedWork:
        if self._stream is None:
            return QueuedWork(None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.cuda.nvtx.range(f"transfer of {nbytes} bytes"):
            torch.cuda._sleep(int(CYCLES * nbytes / self._rate))
            event = torch.cuda.Event()
            event.record()
        return QueuedWork(event)

    def _allgather_base(self, flat: torch.Tensor, mine: torch.Tensor) -> QueuedWork:
        if flat.numel() < 4096 and mine.numel():
            flat.view(-1, mine.numel()).copy_(mine.view(1, -1).expand(flat.numel() // mine.numel(), -1))
        return self._queue((flat.numel() - mine.numel()) * flat.element_size())

    def _reduce_scatter_base(self, out: torch.Tensor, flat: torch.Tensor, *_options: Any) -> QueuedWork:
        return self._queue((flat.numel() - out.numel()) * flat.element_size())

    def alltoall_base(self, out: torch.Tensor, source: torch.Tensor, *_counts: Any) -> QueuedWork:
        return self._queue(source.numel() * source.element_size())

    def allreduce(self, tensors: list[torch.Tensor], *_options: Any) -> QueuedWork:
        return self._queue(2 * sum(tensor.numel() * tensor.element_size() for tensor in tensors))
