"""The ranks along one axis of a job, and the transports between them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch

from deepspeed.comm.base.ranks import Ranks
from deepspeed.comm.job.connect import Connector
from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.transport import LocalTransport, Transport
from deepspeed.comm.watch.watched_group import GroupRecord, WatchedGroup
from deepspeed.uncompiled import uncompiled

Use = Literal["engine", "outside engines", "layers"]
"""The users of a transport: one engine; calls of all ranks outside engines; or layers, losses and loaders."""


class Axis:
    """The ranks along one axis, among which is this one; with their process group, if there are process groups.

    ``device`` is where buffers live where a call does not pass one; None: see :meth:`Connector.create`.
    """

    def __init__(
        self, name: str, record: GroupRecord | None, ranks: Ranks, connector: Connector, device: torch.device | None
    ) -> None:
        self.name = name
        self._record = record
        self._ranks = ranks
        self._connector = connector
        self._device = device

    @property
    def group(self) -> Any:
        """The torch process group; None where there is none."""
        return None if self._record is None else self._record.group

    @property
    def watched(self) -> WatchedGroup | None:
        """The group as the watchdog knows it; None where this rank waits for no other."""
        return None if self._record is None else self._record.watched

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks, as the job numbers them."""
        return (0,) if self._record is None else tuple(self._ranks.ranks_of(self.group))

    @property
    def place(self) -> int:
        """This rank's place among them."""
        return 0 if self._record is None else self._ranks.rank_in(self.group)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if self._record is None else self._ranks.size_of(self.group)

    @uncompiled
    def transport(
        self, use: Use = "engine", *, device: torch.device | None = None, timeout: timedelta | None = None
    ) -> Transport:
        """Returns a transport for buffers between the ranks.

        Args:
            use: "engine": a new transport for the caller alone; where order matters (not gloo) it needs an open lease
                (``ProcessGroups.leased``). "outside engines": the same one for all callers. Every rank of the job must
                request these two, in the same order. "layers": the same one for all callers, which must exchange in one
                order on all ranks of the axis; no other rank has to call to make it.
            device: Where the buffers live; None: the device of the job.
            timeout: Time limit of a communicator that is made; None: torch's.
        """
        if self._record is None:
            return LocalTransport()
        device = self._device if device is None else device
        if use == "layers":
            return self._connector.below_engines(self._record, self.name, device)
        if use == "outside engines":
            return self._connector.outside_engines(self._record, self.name, device, timeout)
        return self._connector.create(self.group, device, timeout, self.name)

    @uncompiled
    def channel(self, device: torch.device | None = None) -> Channel:
        """Returns the channel over the layers' transport, the same one for all callers."""
        if self._record is None:
            return Channel(LocalTransport())
        key = "channel", self.name
        transport = self.transport("layers", device=device)
        if key not in self._record.transports:
            self._record.transports[key] = Channel(transport)
        found: Channel = self._record.transports[key]
        return found

    def objects(self, *, patience: timedelta, why: str) -> Transport:
        """Returns a new transport for objects on the host; arguments as in ``Connector.objects``."""
        return self._connector.objects(self.group, patience=patience, why=why, axis=self.name)
