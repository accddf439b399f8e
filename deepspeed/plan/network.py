"""Ranks that do not exist: transports whose backend moves nothing and says that everything has arrived.

The transports are the real ones of ``deepspeed.comm``, with their chunks, limits, states and counters. Only the
process group beneath them is a stand-in. What it "receives" are this rank's own small values, as if all ranks ran the
same program on the same data; large transfers leave their buffers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from deepspeed.comm.job.fake import FakeGroup, FakeJob
from deepspeed.comm.job.mesh import DATA, Mesh
from deepspeed.comm.transports.connect import HostTransport
from deepspeed.comm.transports.native import NativeTransport
from deepspeed.comm.transports.transport import LocalTransport, Transport
from deepspeed.errors import NotYetSupportedError
from deepspeed.plan.timeline.step_trace import HostWaitEvent, StepRecording, TracedTransport


class _FinishedWork:
    """Work that is done: the network is taken to keep up with the computation."""

    def wait(self, timeout: Any = None) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """Always."""
        return True


class _SimulatedReceive(_FinishedWork):
    """A receive: takes what this rank itself has sent under the same key."""

    def __init__(self, sent: dict[int, torch.Tensor], key: int, place: torch.Tensor) -> None:
        self._sent, self._key, self._place = sent, key, place

    def wait(self, timeout: Any = None) -> None:
        """Fills the place."""
        values = self._sent.get(self._key)
        if values is not None and values.numel() == self._place.numel():
            self._place.copy_(values)


@dataclass(frozen=True, eq=False)
class _PeerGroup(FakeGroup):
    """The group beneath sends and receives."""

    _sent: dict[int, torch.Tensor] = field(default_factory=dict)

    def send(self, tensors: list[torch.Tensor], peer: int, key: int) -> _FinishedWork:
        """Keeps small values for :meth:`recv`."""
        if tensors[0].device.type == "cpu":
            self._sent[key] = tensors[0]
        return _FinishedWork()

    def recv(self, tensors: list[torch.Tensor], peer: int, key: int) -> _FinishedWork:
        """Gives this rank's own values back."""
        return _SimulatedReceive(self._sent, key, tensors[0]) if tensors[0].device.type == "cpu" else _FinishedWork()


class _CollectiveGroup(FakeGroup):
    """The group beneath native collectives."""

    def _allgather_base(self, flat: torch.Tensor, mine: torch.Tensor) -> _FinishedWork:
        if flat.device.type == "cpu":
            flat.view(-1, mine.numel()).copy_(mine.view(1, -1).expand(flat.numel() // mine.numel(), -1))
        return _FinishedWork()

    def _reduce_scatter_base(self, out: torch.Tensor, flat: torch.Tensor) -> _FinishedWork:
        return _FinishedWork()

    def alltoall_base(self, out: torch.Tensor, source: torch.Tensor, received: Any, sent: Any) -> _FinishedWork:
        return _FinishedWork()

    def allreduce(self, tensors: list[torch.Tensor]) -> _FinishedWork:
        return _FinishedWork()


def _as_gathered(rows: torch.Tensor, mine: int) -> torch.Tensor:
    """Returns the gathered rows; a sum that this rank leaves to another one is 1 there."""
    if rows.dtype == torch.float64 and rows[mine, 0] == 0:
        rows[:, 0] = 1.0
        rows[mine, 0] = 0.0
    return rows


class _SimulatedGlooTransport(TracedTransport, HostTransport):
    def gather_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> torch.Tensor:
        """Returns the rows of all ranks as if each had sent this rank's values."""
        self.trace.add(HostWaitEvent())
        return _as_gathered(super().gather_small(tensor, channel=channel, label=label), self.rank)

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> None:
        """Leaves the tensors as they are."""


class _SimulatedNativeTransport(TracedTransport, NativeTransport):
    def gather_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> torch.Tensor:
        """Returns the rows of all ranks as if each had sent this rank's values."""
        self.trace.add(HostWaitEvent())
        return _as_gathered(super().gather_small(tensor, channel=channel, label=label), self.rank)

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> None:
        """Leaves the tensors as they are."""

    def move(self, transfers: Any, *, label: str) -> None:
        """Leaves the tensors as they are."""


class _SimulatedOperations:
    """Collectives of ``torch.distributed`` that leave their tensors as they are."""

    def all_reduce(self, tensor: torch.Tensor, **_options: Any) -> _FinishedWork:
        return _FinishedWork()

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, *_numels: Any, **_options: Any
    ) -> _FinishedWork:
        return _FinishedWork()

    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, **_options: Any) -> _FinishedWork:
        """Gives this rank's own values for those of all."""
        output.view(-1, tensor.numel()).copy_(tensor.reshape(1, -1).expand(output.numel() // tensor.numel(), -1))
        return _FinishedWork()

    def broadcast(self, tensor: torch.Tensor, **_options: Any) -> _FinishedWork:
        return _FinishedWork()

    def __getattr__(self, name: str) -> Any:
        raise NotYetSupportedError(
            f"plan: {name} between ranks is not simulated; keep it out of the model, or plan on one device"
        )


class SimulatedJob(FakeJob):
    """Rank ``rank`` of ``mesh.world_size``, alone.

    Args:
        rank: The simulated rank.
        mesh: All of them, along their axes.
        backend: ``gloo`` or the name of one with native collectives.
        trace: Records transfers; None: nothing does.

    Attributes:
        transports: All that were made.
    """

    def __init__(self, rank: int, mesh: Mesh, backend: str, trace: StepRecording | None = None) -> None:
        super().__init__(rank, mesh, backend, _SimulatedOperations())
        self._trace = trace if trace is not None else StepRecording()
        self.transports: list[Transport] = []

    @override
    def transport(self, device: torch.device | None, ranks: Sequence[int] | None = None, axis: str = DATA) -> Transport:
        members = range(self.size) if ranks is None else ranks
        if len(members) == 1:
            return LocalTransport()
        place = members.index(self.rank), len(members)
        made: _SimulatedGlooTransport | _SimulatedNativeTransport
        if self.ranks.backend_of() == "gloo":
            made = _SimulatedGlooTransport(_PeerGroup(tuple(members)), *place, axis)
        else:
            # Small exchanges tell values, which only the host has in a simulation.
            made = _SimulatedNativeTransport(_CollectiveGroup(tuple(members)), *place, torch.device("cpu"), axis)
        made.ranks, made.trace = tuple(members), self._trace
        self.transports.append(made)
        return made
