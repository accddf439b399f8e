"""A simulated job: one process acts as rank *r* of *N* without the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from typing_extensions import override

from deepspeed.axes import AXES, DATA
from deepspeed.comm.base.ranks import Ranks
from deepspeed.comm.job.axis import Axis
from deepspeed.comm.job.connect import Connector
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.job.new_groups import Owner, ProcessGroups
from deepspeed.comm.transports.transport import LocalTransport, Transport
from deepspeed.comm.watch.watched_group import GroupRecord, WatchedGroup, WatchedGroups


@dataclass(frozen=True)
class FakeGroup:
    """A process group of ranks that do not exist."""

    ranks: tuple[int, ...]  # their numbers in the job, ascending


class FakeJob(Job):
    """Acts as rank ``rank`` of ``layout.world_size`` ranks that do not exist; ``layout`` is not the job's mesh.

    ``operations`` has the collectives of ``torch.distributed`` that are simulated, under their names.
    """

    def __init__(self, rank: int, layout: Mesh, backend: str, operations: Any) -> None:
        self.rank, self.layout, self.size = rank, layout, layout.world_size
        self._fake_ranks = _FakeRanks(rank, self.size, backend, operations)
        self.substitutes: dict[Any, Callable[..., Any]] = {}  # replacements of classes, for :meth:`Job.make`
        super().__init__()

    def transport(self, device: torch.device | None, ranks: Sequence[int] | None = None, axis: str = DATA) -> Transport:
        """Returns a transport for buffers on ``device`` between ``ranks`` (None: all), which lie along ``axis``."""
        raise NotImplementedError

    @override
    def is_over(self) -> bool:
        return False

    @override
    def make(self, kind: Callable[..., Any], *arguments: Any) -> Any:
        return self.substitutes.get(kind, kind)(*arguments)

    @override
    def axis_of(self, group: Any = None, name: str | None = None) -> Axis:
        if name in AXES and not isinstance(group, FakeGroup):  # simulated ranks have the groups of the mesh
            group = FakeGroup(tuple(self.layout.group(self.rank, name)))
        return super().axis_of(group, name)

    @override
    def _parts(self) -> tuple[Ranks, WatchedGroups, ProcessGroups, Connector]:
        ranks = self._fake_ranks
        watched = _FakeWatchedGroups(ranks)
        process_groups = _FakeProcessGroups(ranks, watched)
        return ranks, watched, process_groups, _FakeConnector(self, ranks, watched, process_groups)


class _FakeRanks(Ranks):
    def __init__(self, rank: int, size: int, backend: str, operations: Any) -> None:
        self._rank, self._size, self._backend = rank, size, backend
        self.operations = operations
        self._world = FakeGroup(tuple(range(size)))

    @property
    def world(self) -> Any:
        return self._world

    @override
    def is_initialized(self) -> bool:
        return True

    @override
    def rank_in(self, group: Any = None) -> int:
        return group.ranks.index(self._rank) if isinstance(group, FakeGroup) else self._rank

    @override
    def size_of(self, group: Any = None) -> int:
        return len(group.ranks) if isinstance(group, FakeGroup) else self._size

    @override
    def ranks_of(self, group: Any = None) -> list[int]:
        return list(group.ranks) if isinstance(group, FakeGroup) else super().ranks_of(group)

    @override
    def backend_of(self, group: Any = None) -> str:
        return self._backend

    @override
    def backend_for(self, group: Any, device: torch.device | None) -> str:
        return self._backend

    @override
    def backends_of(self, group: Any = None) -> str:
        return self._backend


class _FakeWatchedGroups(WatchedGroups):
    """Registers no group with a watchdog, and destroys none."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._by_ranks: dict[tuple[int, ...], GroupRecord] = {}

    @override
    def of(self, group: Any = None) -> WatchedGroup | None:
        return None

    @override
    def record_of(self, group: Any = None) -> GroupRecord:
        members = tuple(self._ranks.ranks_of(group))
        made = GroupRecord(group if isinstance(group, FakeGroup) else FakeGroup(members), None)
        return self._by_ranks.setdefault(members, made)

    @override
    def records(self) -> list[GroupRecord]:
        return []

    @override
    def known_reason(self) -> Exception | None:
        return None


class _FakeProcessGroups(ProcessGroups):
    @override
    def mine(
        self,
        groups: Sequence[Sequence[int]],
        *,
        backend: str,
        timeout: timedelta | None,
        why: str,
        owner: Owner = "engine",
    ) -> Any:
        me = self._ranks.rank_in()
        return FakeGroup(tuple(next(sorted(ranks) for ranks in groups if me in ranks)))

    @override
    def alone(self) -> Any:
        return FakeGroup((self._ranks.rank_in(),))

    @override
    def beside(self, group: Any, timeout: timedelta | None) -> list[list[int]]:
        return [self._ranks.ranks_of(group)]


class _FakeConnector(Connector):
    def __init__(self, job: FakeJob, *parts: Any) -> None:
        super().__init__(*parts)
        self._job = job

    @override
    def create(
        self,
        group: Any,
        device: torch.device | None,
        timeout: timedelta | None,
        axis: str = DATA,
        *,
        owner: Owner = "engine",
    ) -> Transport:
        return self._job.transport(device, None if group is None else self._ranks.ranks_of(group), axis)

    @override
    def outside_engines(
        self, record: GroupRecord, axis: str, device: torch.device | None, timeout: timedelta | None
    ) -> Transport:
        return self.create(record.group, device, timeout, axis)

    @override
    def objects(self, group: Any, *, patience: timedelta, why: str, axis: str = DATA) -> Transport:
        return LocalTransport()

    @override
    def _over(self, group: Any, backend: str, device: torch.device | None, axis: str) -> Transport:
        return self.create(group, device, None, axis)
