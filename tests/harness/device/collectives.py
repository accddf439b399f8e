"""Collectives as NCCL has them: queued on a stream of their communicator, waited for by streams and not by the host.

The other ranks are mirrors of this one: what a rank receives is what it has sent itself, as if all had the same data.
Their clocks are not needed, because a collective touches only this rank's memory, and only on this rank's stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.axes import DATA
from deepspeed.comm.job.fake import FakeJob
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.native import NativeTransport
from deepspeed.comm.transports.transport import LocalTransport, Transport
from tests.harness.device.accelerator import on_stream
from tests.harness.device.clocks import Clocks, Event


class _Queued:
    """A collective on its way. It keeps its tensors until it is waited for, as NCCL's works do."""

    def __init__(self, group: Communicator, done: Event, tensors: Any) -> None:
        self._group = group
        self._done = done
        self._tensors = tensors
        group.unfinished.append(self)

    def wait(self, timeout: Any = None) -> bool:
        """Later work of the current stream comes after it; the host continues."""
        self._group.clocks.current.wait_event(self._done)
        self._tensors = None
        if self in self._group.unfinished:
            self._group.unfinished.remove(self)
        return True

    def is_completed(self) -> bool:
        return self._done.query()


class Communicator:
    """A process group of one backend with a stream of its own.

    Args:
        clocks: Of the device.
        name: For sentences.
        place: Rank and size.

    Attributes:
        unfinished: What nobody has waited for.
    """

    def __init__(self, clocks: Clocks, name: str, place: tuple[int, int]) -> None:
        self.clocks = clocks
        self.rank, self.size = place
        self.stream = clocks.new_stream(name)
        self.unfinished: list[_Queued] = []

    def _queue(self, run: Any, *tensors: torch.Tensor) -> _Queued:
        for tensor in tensors:
            if tensor.device.type == "cpu":
                raise RuntimeError(f"No backend type associated with device type cpu (shape {tuple(tensor.shape)})")
        self.stream.wait_stream(self.clocks.current)
        with on_stream(self.clocks, self.stream), torch.no_grad():
            run()
        return _Queued(self, self.stream.record_event(), tensors)

    def _allgather_base(self, flat: torch.Tensor, mine: torch.Tensor) -> _Queued:
        def run() -> None:
            for row in flat.view(self.size, -1):
                if row.data_ptr() != mine.data_ptr():  # in place it stays where it is
                    row.copy_(mine.view(-1))

        return self._queue(run, flat, mine)

    def _reduce_scatter_base(self, out: torch.Tensor, flat: torch.Tensor) -> _Queued:
        def run() -> None:
            torch.mul(flat.view(self.size, -1)[self.rank], self.size, out=out.view(-1))

        return self._queue(run, out, flat)

    def allreduce(self, tensors: list[torch.Tensor], *_options: Any) -> _Queued:
        return self._queue(lambda: tensors[0].mul_(self.size), *tensors)

    def broadcast(self, tensor: torch.Tensor, source: int) -> _Queued:
        """Fills ``tensor`` with zeros where another rank is the source: this rank has nothing to mirror."""
        return self._queue(lambda: tensor.clone() if source == self.rank else tensor.zero_(), tensor)

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_numels: list[int], input_numels: list[int]
    ) -> _Queued:
        """Every peer sends what this rank sends to itself, cut or repeated to the length that is expected of it."""

        def run() -> None:
            mine = tensor.split(input_numels)[self.rank]
            for part in output.split(output_numels):
                if part.numel() and mine.numel():
                    part.copy_(mine.repeat(-(-part.numel() // mine.numel()))[: part.numel()])
                else:
                    part.zero_()

        return self._queue(run, output, tensor)

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int], *_options: Any
    ) -> _Queued:
        """Splits rows along the first dimension, as NCCL does. No counts mean equal parts."""
        widths = [x[:1].numel() or 1 for x in (output, tensor)]
        rows = [counts or [len(x) // self.size] * self.size for counts, x in ((received, output), (sent, tensor))]
        numels = [[count * width for count in counts] for counts, width in zip(rows, widths, strict=True)]
        return self.all_to_all(output.view(-1), tensor.view(-1), *numels)

    def abort(self) -> None:
        self.unfinished.clear()


class _Operations:
    """Collectives of ``torch.distributed`` itself, over a communicator of all ranks."""

    def __init__(self, group: Communicator) -> None:
        self._group = group

    def all_reduce(self, tensor: torch.Tensor, async_op: bool = False, **_options: Any) -> _Queued | None:
        return self._waited(self._group.allreduce([tensor]), async_op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, async_op: bool = False, **_options: Any) -> _Queued | None:
        return self._waited(self._group.broadcast(tensor, src), async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_numels: list[int],
        input_numels: list[int],
        async_op: bool = False,
        **_options: Any,
    ) -> _Queued | None:
        return self._waited(self._group.all_to_all(output, tensor, output_numels, input_numels), async_op)

    def _waited(self, work: _Queued, async_op: bool) -> _Queued | None:
        if async_op:
            return work
        work.wait()
        return None


class _Mirrored(NativeTransport):
    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> None:
        self.group.broadcast(tensor, source).wait()

    def move(self, transfers: Any, *, label: str) -> None:
        for transfer in transfers:
            if transfer.tensor is not None and transfer.tensor.numel():
                self.group.broadcast(transfer.tensor, transfer.source).wait()


class MirrorJob(FakeJob):
    """Rank ``rank`` of ``size`` equal ones, on the backend ``nccl``.

    Attributes:
        communicators: In the order in which they were made; the first is that of the collectives of torch.
    """

    def __init__(self, clocks: Clocks, rank: int, size: int) -> None:
        self._clocks = clocks
        self.communicators: list[Communicator] = []
        super().__init__(rank, Mesh(((DATA, size),)), "nccl", _Operations(self.communicator((rank, size))))

    def communicator(self, place: tuple[int, int]) -> Communicator:
        """Returns a new communicator in which this rank has ``place``: rank and size."""
        made = Communicator(self._clocks, f"the stream of communicator {len(self.communicators)}", place)
        self.communicators.append(made)
        return made

    def transport(self, device: torch.device | None, ranks: Sequence[int] | None = None, axis: str = DATA) -> Transport:
        members = range(self.size) if ranks is None else ranks
        if len(members) == 1:
            return LocalTransport()
        place = members.index(self.rank), len(members)
        device = device if device is not None else torch.device("cuda", 0)
        made = _Mirrored(self.communicator(place), *place, device, axis)
        made.ranks = tuple(members)
        return made
