"""A process group with simulated peers, whose transfers keep a CUDA stream busy as long as real ones would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.comm.transports.native import NativeTransport

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
    """Takes the place of NCCL's process group in a ``NativeTransport``.

    A rank receives its own data, so that weights and gradients have plausible values, and device memory is written as
    by NCCL.

    Args:
        stream: Stream of the transfers; None: transfers are done at once, as on a CPU.
        rate: Bytes per second.
    """

    def __init__(self, stream: Any, rate: float) -> None:
        self._stream = stream
        self._rate = rate

    def _queue(self, nbytes: int, arrive: Callable[[], Any]) -> QueuedWork:
        if self._stream is None:
            arrive()
            return QueuedWork(None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.cuda.nvtx.range(f"transfer of {nbytes} bytes"):
            torch.cuda._sleep(int(CYCLES * nbytes / self._rate))
            arrive()
            event = torch.cuda.Event()
            event.record()
        return QueuedWork(event)

    def _allgather_base(self, flat: torch.Tensor, mine: torch.Tensor) -> QueuedWork:
        def arrive() -> None:
            for part in flat.view(-1, mine.numel()) if mine.numel() else ():
                if part.data_ptr() != mine.data_ptr():
                    part.copy_(mine.view(-1))

        return self._queue((flat.numel() - mine.numel()) * flat.element_size(), arrive)

    def _reduce_scatter_base(self, out: torch.Tensor, flat: torch.Tensor, *_options: Any) -> QueuedWork:
        """Writes the first slice times the number of ranks to ``out``, as if all ranks had sent the same."""
        ranks = flat.numel() // max(out.numel(), 1)
        return self._queue(
            (flat.numel() - out.numel()) * flat.element_size(),
            lambda: torch.mul(flat[: out.numel()], ranks, out=out),
        )

    def alltoall_base(self, out: torch.Tensor, source: torch.Tensor, *_counts: Any) -> QueuedWork:
        return self._queue(source.numel() * source.element_size(), lambda: out.view(-1).copy_(source.view(-1)))

    def allreduce(self, tensors: list[torch.Tensor], *_options: Any) -> QueuedWork:
        """Leaves the tensors unchanged, as if the other ranks had sent zeros."""
        return self._queue(2 * sum(tensor.numel() * tensor.element_size() for tensor in tensors), lambda: None)


class QueuedTransport(NativeTransport):
    """The package's transport for NCCL over a :class:`QueuedGroup`, which has neither broadcasts nor sends."""

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> None:
        """Leaves the tensor unchanged."""

    def move(self, transfers: Any, *, label: str) -> None:
        """Leaves the tensors unchanged."""
