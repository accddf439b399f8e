"""The job: everything that belongs to one instance of torch's default process group.

``init_distributed`` opens a job. If the program starts the process group itself, the next public call that needs the
job adopts the group (:meth:`Job.adopt`). The job is over when the process group is destroyed; the next process group is
another job, perhaps of other ranks. Its watchdog, process groups, transports, mesh and declared groups are attributes
of the job, so that nothing of it outlives it.

Public losses, layers and loaders get a process group from the program. :func:`axis_of` makes it an axis of the job, so
that the watchdog supervises their transfers, counters count them, and plans simulate them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from typing_extensions import Self

from deepspeed.axes import AXES, DATA, OTHER_PARTS, PIPE, SAME_EXPERTS, SAME_PART, SAMPLES
from deepspeed.comm.base.counters import JOB
from deepspeed.comm.base.ranks import Ranks
from deepspeed.comm.job.axis import Axis
from deepspeed.comm.job.connect import Connector
from deepspeed.comm.job.declared_groups import DeclaredGroups
from deepspeed.comm.job.expert_groups import ExpertGroups
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.job.new_groups import ProcessGroups
from deepspeed.comm.watch.backward_notes import BackwardNotes
from deepspeed.comm.watch.watched_group import WatchedGroups
from deepspeed.errors import CallOrderError
from deepspeed.uncompiled import uncompiled

# pipeline stages make their groups themselves
_ALONE = tuple((axis,) for axis in reversed(AXES) if axis not in (DATA, PIPE))
_WITH_A_GROUP = (SAMPLES, SAME_PART, OTHER_PARTS, *_ALONE, SAME_EXPERTS)


class Job:
    """The ranks of one default process group, or of none yet."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device  # where buffers live where a call does not pass one; None: see ``Connector.create``
        # Which ranks there are; the process groups in use, and the watch; what makes process groups and transports.
        self.ranks, self.watched, self.process_groups, self.connector = self._parts()
        self._world = self.ranks.world
        self.declared = DeclaredGroups(self.ranks, self.process_groups, self.connector)  # groups that parameters name
        self.experts = ExpertGroups(self.ranks, self.watched, self.process_groups, self.connector, self.declared)
        self.backward = BackwardNotes()  # the exchanges that layers have declared for backward passes
        self.mpu: Any = None  # the program's model-parallel unit
        self.mesh: Mesh | None = None  # None: all ranks are data-parallel
        self.purpose = ""  # what the program is doing, for messages about failed waits
        # The run's membership, which outlives the job, if ranks may change (``comm.members.join``).
        self.members: Any = None
        self._of_axes: dict[tuple[str, ...], Any] = {}  # this rank's groups along axes of more than one rank

    def _parts(self) -> tuple[Ranks, WatchedGroups, ProcessGroups, Connector]:
        ranks = Ranks()
        watched = WatchedGroups(ranks)
        process_groups = ProcessGroups(ranks, watched)
        return ranks, watched, process_groups, Connector(ranks, watched, process_groups)

    @staticmethod
    def current() -> Job:
        """Returns the job of the process group that there is now, or of no ranks. Opens and closes nothing.

        Raises:
            CallOrderError: The program has started this process group itself, and nothing has adopted it.
        """
        if not _current.is_over():
            return _current
        if _current.ranks.world is None:
            return Job()  # the program has destroyed the process group; nothing of its job applies any more
        raise CallOrderError(
            "torch.distributed.init_process_group: expected a call of deepspeed that adopts the new process group "
            "before a layer or an engine uses it, found none. Call deepspeed.init_distributed() after "
            "init_process_group, on every rank"
        )

    @staticmethod
    def adopt() -> Job:
        """Returns the current job. Opens it first if the program itself has started or destroyed the process group.

        For public functions, and for layers of the program at their forward: code below them gets the job from them,
        or calls :meth:`current`.
        """
        return Job.open() if _current.is_over() else _current

    @staticmethod
    def open(mesh: Mesh | None = None, device: torch.device | None = None) -> Job:
        """Opens a job on the process group that there is now, and closes the one before.

        Whoever starts a process group calls it. With ``mesh`` (None: all ranks are data-parallel) every rank must call
        it. ``device`` is as of the class.

        Raises:
            DeepSpeedConfigError: The mesh is not one of as many ranks as the process group has.
            DivergenceError: Some rank does something else.
            CommunicationError: Some rank has ended or did not arrive.
        """
        made = Job(device)
        if mesh is not None:
            mesh.check(made.ranks.size_of())  # before the present job ends
        before = _replace(made)
        if before._world is None:  # an mpu may be registered before the process group is started
            made.mpu = before.mpu
        before.close()
        made.set_mesh(mesh)
        return made

    def close(self) -> None:
        """Stops the watchdog and drops all that belongs to the job. Its transports cannot be used any more.

        The process groups stay: they are torch's, and end with ``destroy_process_group``.
        """
        self.watched.close()
        self._of_axes.clear()
        self.mpu = self.mesh = None
        if _current is self:
            _replace(Job())

    @property
    def awaits_copies(self) -> bool:
        """Whether an engine that is made now is filled from copies of an earlier job of the same run."""
        return self.members is not None and bool(self.members.awaits_copies)

    def is_over(self) -> bool:
        """Returns whether this job's process group was destroyed or replaced."""
        return self.ranks.world is not self._world

    @contextmanager
    def as_current(self) -> Iterator[Self]:
        """Makes this the current job inside the context; afterwards the former one is current again. For one thread."""
        before = _replace(self)
        try:
            yield self
        finally:
            _replace(before)

    @contextmanager
    def during(self, purpose: str) -> Iterator[None]:
        """Names ``purpose`` in errors about collectives inside the context."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    def make(self, kind: Callable[..., Any], *arguments: Any) -> Any:
        """Returns ``kind(*arguments)``, or a simulated job's substitute."""
        return kind(*arguments)

    def axis(self, *names: str, size: int | None = None, device: torch.device | None = None) -> Axis:
        """Returns the ranks along axes of the mesh, among which is this one. Every rank must call it, in one order.

        Args:
            names: Axis names of ``comm.job.mesh``, in any order.
            size: With "expert": how many ranks share the experts of a layer, which may differ between layers; the
                groups of that size must have been declared (``ExpertGroups.declare``).
            device: Where buffers live where a call does not pass one.

        Raises:
            CallOrderError: No mesh is registered, or no groups of that size are declared.
        """
        if size is not None:
            return self.experts.axis(size, device or self._device)
        return self.axis_of(self.group_along(*names), names[0])

    def axis_of(self, group: Any = None, name: str | None = None) -> Axis:
        """Returns the ranks of a process group as an axis. No other rank has to call.

        Args:
            group: A torch process group; None: of all ranks.
            name: The name of the axis, for the traffic counters. None: "data", or "job" where ranks of the group
                hold different parts of the model.
        """
        record = self.watched.record_of(group) if self.ranks.is_initialized() else None
        if name is None:
            # All ranks of a mesh that divides the model; every other group is data-parallel.
            divided = self.mesh if self.mesh is not None and self.mesh.size(*OTHER_PARTS) > 1 else None
            size = 0 if record is None else self.ranks.size_of(record.group)
            name = JOB if divided is not None and size >= divided.world_size else DATA
        return Axis(name, record, self.ranks, self.connector, self._device)

    def axis_over(
        self,
        lists: Sequence[Sequence[int]],
        name: str,
        *,
        why: str,
        device: torch.device | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
    ) -> Axis:
        """Returns an axis with a process group that the job owns. Every rank must call it, in one order.

        Each transfer must belong to a call of the program that all ranks of a group make in one order, or to its mirror
        in a backward pass (``new_groups.Owner``). All who give the same lists and words share the group. An axis of all
        ranks has the group of all ranks where that is gloo's.

        Args:
            lists: The members of all groups of the axis; every rank of the job is in exactly one.
            why: What its groups are for, in words, shown if a rank waits in vain.
            device: Where the buffers live, which decides the backend.
            timeout: For transfers in a group that is made now; None: torch's.
            backend: The backend of the groups; None: that for ``device``.
        """
        usual = self.ranks.backend_for(self.ranks.world, device)
        backend = usual if backend is None else backend
        if len(lists) == 1 and backend == usual == "gloo":
            return self.axis_of(self.ranks.world, name)
        group = self.process_groups.mine(lists, backend=backend, timeout=timeout, why=why, owner="job")
        return self.axis_of(group, name)

    def set_mesh(self, found: Mesh | None, timeout: timedelta | None = None) -> None:
        """Registers the mesh and makes process groups along its axes. None removes it. Every rank must call it.

        Raises:
            DeepSpeedConfigError: It is not one of as many ranks as the job has.
            DivergenceError: Some rank does something else.
            CommunicationError: Some rank has ended or did not arrive.
        """
        if found is not None and found == self.mesh:
            return  # another engine of the same job
        if found is not None:
            found.check(self.ranks.size_of())
        self.mesh = found
        self._of_axes.clear()
        if found is None:
            return
        for axes in _WITH_A_GROUP:
            if self._effective(axes):  # a group of one can be made on request: each has threads of its own
                self.group_along(*axes, timeout=timeout)

    def group_along(self, *axes: str, timeout: timedelta | None = None) -> Any:
        """Returns this rank's process group along axes of the mesh. Every rank must call it, in the same order.

        A group is made once, whatever the order of ``axes``: axes of one rank make no difference. ``timeout`` is for
        transfers in a group that is made now; None: torch's.

        Raises:
            CallOrderError: No mesh is registered.
            DivergenceError: Some rank does something else.
            CommunicationError: Some rank has ended or did not arrive.
        """
        if self.mesh is None:
            raise CallOrderError(
                f"groups.group_along({', '.join(map(repr, axes))}): the job has no mesh yet; deepspeed.initialize "
                "makes it from the configuration, or call deepspeed.utils.groups.set_mesh first"
            )
        key = self._effective(axes)
        if not key:
            return self.process_groups.alone()
        if key not in self._of_axes:
            if self.mesh.size(*key) == self.mesh.world_size:
                self._of_axes[key] = self.ranks.world
            else:
                why = f"ranks along {' and '.join(key)}"
                backend = self.ranks.backends_of(self.ranks.world)
                self._of_axes[key] = self.process_groups.mine(
                    self.mesh.groups(*key), backend=backend, timeout=timeout, why=why, owner="job"
                )
        return self._of_axes[key]

    def known_group_along(self, *axes: str) -> Any:
        """Returns this rank's process group along axes of the mesh, which exists; None where no mesh is registered."""
        if self.mesh is None:
            return None
        key = self._effective(axes)
        return self._of_axes[key] if key else self.process_groups.alone()

    def place_along(self, *axes: str) -> int:
        """Returns this rank's place along axes of the mesh; 0 without a mesh."""
        if self.mesh is None or not self._effective(axes):
            return 0
        return self.ranks.rank_in(self.known_group_along(*axes))

    def size_along(self, *axes: str) -> int:
        """Returns the number of ranks along axes of the mesh; 1 without a mesh."""
        return 1 if self.mesh is None else self.mesh.size(*axes)

    def _effective(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns those of ``axes`` that have more than one rank, in the order of the mesh."""
        assert self.mesh is not None
        return tuple(name for name, size in self.mesh.axes if name in axes and size > 1)


_current = Job()


def _replace(job: Job) -> Job:
    """Makes ``job`` the current one, and returns the one before."""
    global _current
    before, _current = _current, job
    return before


@uncompiled
def axis_of(group: Any, name: str | None = None) -> Axis:
    """Returns the ranks of a program's process group as an axis of the current job. No other rank has to call.

    What outlives a job or a plan, such as a layer, keeps the group and calls this in each forward. Arguments are those
    of :meth:`Job.axis_of`.
    """
    return Job.adopt().axis_of(group, name)


# Ranks have no state, so these need no open job.


def is_initialized() -> bool:
    """Returns whether the job has more than one rank."""
    return _current.ranks.is_initialized()


def rank_in(group: Any = None) -> int:
    """Returns this process's rank in ``group`` (None: among all)."""
    return _current.ranks.rank_in(group)


def size_of(group: Any = None) -> int:
    """Returns the number of ranks in ``group`` (None: of all)."""
    return _current.ranks.size_of(group)


def ranks_of(group: Any = None) -> list[int]:
    """Returns the numbers in the job of the members of ``group`` (None: all), in its order."""
    return _current.ranks.ranks_of(group)


def backend_of(group: Any = None) -> str:
    """Returns the backend of ``group``."""
    return _current.ranks.backend_of(group)


def define_group(
    name: str,
    ranks: Sequence[Sequence[int]],
    divisor: int | None = None,
    *,
    is_whole: bool = False,
    lasts: bool = True,
) -> None:
    """Declares a group for parameters that are not the same on all data-parallel ranks.

    Every rank of the job must call it alike; arguments and errors as in ``DeclaredGroups.define``.
    """
    Job.adopt().declared.define(name, ranks, divisor, is_whole=is_whole, lasts=lasts)
