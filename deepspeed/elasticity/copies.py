"""Copies of model states in host memory: of this rank's own slices, and of those of its neighbour.

After a step every rank copies its masters, optimizer states and small states, and sends the copy to another rank, its
*buddy* (``CopyLayout.ring``). The two newest generations are kept, so that a death while copies are sent leaves the one
before whole. Where other ranks have the same slices (MiCS) nothing is sent: their own copies serve. A buddy on the same
host opens the memory itself, so that a copy is made once and not sent. Where every rank has everything (stage 0 of a
model of one part) nothing is copied ahead: the states of any rank that is left will do.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from typing_extensions import override

from deepspeed.checkpoint.collect import is_per_element
from deepspeed.checkpoint.disk import bytes_of
from deepspeed.checkpoint.exchange import Exchange
from deepspeed.checkpoint.format import COMPUTE, MASTER, SavedRun, optimizer_kind
from deepspeed.checkpoint.param_groups import RankGroups
from deepspeed.checkpoint.roster import roster
from deepspeed.checkpoint.run_state import RunState
from deepspeed.checkpoint.states import random_state
from deepspeed.comm.members.member import RunMember
from deepspeed.comm.members.regroup import ReadyMember
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.comm.transports.transport import TensorTransfer, Transport
from deepspeed.elasticity.copy_memory import CopyMemory, open_memory
from deepspeed.zero.tiling.layout import BucketLayout
from deepspeed.zero.update.masters import MasterBucket

_ALIGNMENT = 64  # bytes, so that every run begins on a cache line
_KEPT = 2  # generations


@dataclass(frozen=True)
class CopyLayout:
    """Describes the layout that the copies of one job share; equal on all of its ranks.

    Attributes:
        epoch: Of the job.
        owners: Numbers of its members, by rank.
        buckets: Of the model.
        left_out: Names of parameters that every rank has and that are not copied: frozen ones that are not sharded.
        frozen: Names of parameters without gradient.
        aliases: Further names of tied parameters.
        is_whole: Each copy has everything, so that one of them is enough.
        parts: Which part of the model states each rank has; ranks with the same number hold the same slices.
        model_parts: Parts of the model, which neighbouring ranks hold; small states belong to one of them.
    """

    epoch: int
    owners: tuple[int, ...]
    buckets: tuple[BucketLayout, ...]
    left_out: frozenset[str]
    frozen: frozenset[str]
    aliases: dict[str, str]
    is_whole: bool
    parts: tuple[int, ...]
    model_parts: int = 1

    @property
    def has_replicas(self) -> bool:
        """Whether every part is on several ranks."""
        return all(self.parts.count(part) > 1 for part in self.parts)

    @property
    def ring(self) -> list[int]:
        """The ranks in an order in which each one's buddy is the next.

        That is one with the same part of the model for other samples, so that the ranks of one copy of the model,
        perhaps those of a host, may be lost at once.
        """
        return sorted(range(len(self.owners)), key=lambda rank: (rank % self.model_parts, rank))

    def is_alike(self, owner: int, rank: int) -> bool:
        """Returns whether the small states of ``owner`` equal those of ``rank``, apart from what is per process."""
        return self.owners.index(owner) % self.model_parts == rank % self.model_parts

    @classmethod
    def of(cls, run_state: RunState, epoch: int, owners: Sequence[int]) -> CopyLayout:
        """Returns that of a model of one part. Nothing is communicated."""
        left_out, frozen = set(), set()
        is_whole, sharing = True, len(owners)
        for bucket in run_state.runtime.buckets:
            master = run_state.runtime.master_of(bucket)
            sharing = min(sharing, bucket.group.owners.size)
            names = {tile.logical for tile in bucket.layout.tiles}
            if master is None:
                frozen |= names
                left_out |= set() if bucket.is_sharded else names
            is_whole = is_whole and not (bucket.is_sharded if master is None else master.is_sharded)
        buckets = tuple(bucket.layout for bucket in run_state.runtime.buckets)
        return cls(
            epoch,
            tuple(owners),
            buckets,
            frozenset(left_out),
            frozenset(frozen),
            run_state.aliases(),
            is_whole,
            tuple(0 if is_whole else rank % sharing for rank in range(len(owners))),
        )


def layout_of_parts(
    run_state: RunState, epoch: int, owners: Sequence[int], model_parts: int, transport: Transport
) -> tuple[CopyLayout, dict[int, int]]:
    """Returns the layout of a model of which ranks have different parts, and the numbers of this rank's buckets there.

    Parameters that several parts have alike are copied by one of them. Every rank of the job must call it.

    Args:
        run_state: The training run.
        epoch: Of the job.
        owners: Numbers of its members, by rank.
        model_parts: See :class:`CopyLayout`.
        transport: Between the ranks, over host memory.
    """
    mine = CopyLayout.of(run_state, epoch, owners)
    if run_state.stage == 3:  # where one copy of the model is left, nothing is sharded, and a spare has nothing of it
        mine = replace(mine, left_out=frozenset())
    listed = roster(run_state, Exchange(transport=transport))
    numbers = dict(listed.numbers)
    slices = tuple(
        (numbers[index], start) for _, index, start, _ in _own_ranges(run_state, mine.left_out) if index in numbers
    )
    gathered = gather_objects(transport, (mine.left_out, mine.frozen, slices), label="listing the model for copies")
    known = list(dict.fromkeys(found for _, _, found in gathered))
    layout = CopyLayout(
        epoch,
        tuple(owners),
        listed.buckets,
        frozenset().union(*(left_out for left_out, _, _ in gathered)),
        frozenset().union(*(frozen for _, frozen, _ in gathered)),
        listed.aliases,
        is_whole=False,  # a rank that has made an update may find others that have not, and lacks what these hold
        parts=tuple(known.index(found) for _, _, found in gathered),
        model_parts=model_parts,
    )
    return layout, numbers


@dataclass(frozen=True)
class ForwardStates:
    """States of one rank that forwards change, so that a step which is broken off must not leave them behind.

    Attributes:
        buffers: Persistent buffers by name, on the host.
        random: States of the random number generators.
        extra_state: Extra state of modules.
    """

    buffers: dict[str, torch.Tensor]
    random: dict[str, Any]
    extra_state: dict[str, Any]

    @classmethod
    def of(cls, run_state: RunState) -> ForwardStates:
        """Returns a copy of those of this moment."""
        buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in run_state.buffers().items()}
        return cls(buffers, random_state(), run_state.extra_state())


@dataclass
class SmallStates:
    """States of one rank that are no large tensors.

    Attributes:
        counters: Of the engine.
        optimizer: Name of the torch optimizer's class.
        groups: Hyperparameters of each param group, with the names of its parameters.
        scalars: Scalar optimizer states of this rank's runs, with the names of their parameters.
        loss_scaler: Its state, or None.
        skipped_in_a_row: Updates skipped since the last one that was applied.
        lr_scheduler: State of the schedule, or None.
        forward: What forwards change.
    """

    counters: dict[str, int]
    optimizer: str | None
    groups: list[dict[str, Any]]
    scalars: list[tuple[tuple[str, ...], dict[str, Any]]]
    loss_scaler: dict[str, Any] | None
    skipped_in_a_row: int
    lr_scheduler: dict[str, Any] | None
    forward: ForwardStates


@dataclass
class StateCopy:
    """A copy of the states of one rank.

    Attributes:
        generation: The number of updates after which it was made.
        owner: Number of the member whose states they are.
        layout: Of its job.
        runs: Where each run lies in ``data``, by kind.
        small: Pickled :class:`SmallStates`.
        data: The values as bytes, in host memory.
        memory: Which is this, where this process made it.
    """

    generation: int
    owner: int
    layout: CopyLayout
    runs: dict[str, tuple[SavedRun, ...]]
    small: bytes
    data: torch.Tensor
    memory: CopyMemory | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Generation and epoch: copies with one key fit together."""
        return self.generation, self.layout.epoch

    @property
    def part(self) -> int:
        """Which part of the model states it is, see :class:`CopyLayout`."""
        return self.layout.parts[self.layout.owners.index(self.owner)]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.data.numel() + len(self.small)


class CopyStore:
    """The copies that one process holds.

    Args:
        number: Of this process among the members.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._held: dict[tuple[tuple[int, int], int], StateCopy] = {}

    def put(self, copy: StateCopy) -> None:
        """Keeps a copy, and forgets those of the same owner and job that are no longer needed."""
        self._held[copy.key, copy.owner] = copy

    def trim(self, epoch: int) -> None:
        """Keeps the newest generations of a job. Copies of former jobs go once a whole one of this job is there."""
        keys = sorted({key for key, _ in self._held if key[1] == epoch}, reverse=True)[:_KEPT]
        self._held = {(key, owner): copy for (key, owner), copy in self._held.items() if key in keys}

    def clear(self) -> None:
        """Forgets everything: what is held belongs to states that were replaced."""
        self._held.clear()

    def drop_oldest(self, owner: int, epoch: int) -> StateCopy | None:
        """Drops the copy of ``owner`` that is no longer needed once there is a further one, and returns it.

        Copies of former jobs are not touched: a recovery that is broken off begins with them again.
        """
        mine = sorted((key for key, of in self._held if of == owner and key[1] == epoch), reverse=True)
        return self._held.pop((mine[-1], owner)) if len(mine) >= _KEPT else None

    def spare(self, owner: int, size: int, epoch: int) -> CopyMemory:
        """Returns memory for a copy of ``owner``: that of the one which is no longer needed, if it fits."""
        oldest = self.drop_oldest(owner, epoch)
        if oldest is not None and oldest.memory is not None and oldest.data.numel() == size:
            return oldest.memory
        return CopyMemory(size)

    def listed(self) -> list[list[Any]]:
        """Returns key, part and number of all parts, of each copy: for messages."""
        return [[list(copy.key), copy.part, len(set(copy.layout.parts))] for copy in self._held.values()]

    def of_key(self, key: tuple[int, int]) -> list[StateCopy]:
        """Returns the copies with a key, this process's own first."""
        found = [copy for copy in self._held.values() if copy.key == key]
        return sorted(found, key=lambda copy: copy.owner != self._number)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(copy.nbytes for copy in self._held.values())


def newest_whole(living: Sequence[RunMember], ready: Mapping[int, ReadyMember]) -> tuple[int, int] | None:
    """Returns the newest generation and epoch that the living members hold completely; None: there is none."""
    parts_of: dict[tuple[int, int], set[int]] = {}
    found: set[tuple[int, int]] = set()
    for member in living:
        for (generation, epoch), part, count in ready[member.number].held:
            key = int(generation), int(epoch)
            parts_of.setdefault(key, set()).add(int(part))
            if len(parts_of[key]) == int(count):
                found.add(key)
    return max(found, default=None)


# -- taking ------------------------------------------------------------------------------------------------------------


def small_states(run_state: RunState, forward: ForwardStates | None = None) -> bytes:
    """Returns :class:`SmallStates` of this rank, pickled, so that they are as they were.

    Args:
        run_state: The training run.
        forward: What forwards change, as it was before the step that is broken off; None: as it is now.
    """
    zero, optimizer = run_state.optimizer, run_state.torch_optimizer
    schedule = run_state.schedule_state()
    names = run_state.group_names()
    hyperparameters = RankGroups.of(optimizer, None).hyperparameters
    return _pickled(
        SmallStates(
            counters=dict(run_state.counters),
            optimizer=type(optimizer).__name__ if optimizer is not None else None,
            groups=[{**group, "params": members} for group, members in zip(hyperparameters, names, strict=True)],
            scalars=list(_scalars(run_state)),
            loss_scaler=zero.loss_scaler.state_dict() if zero is not None and zero.loss_scaler is not None else None,
            skipped_in_a_row=zero.skipped_in_a_row if zero is not None else 0,
            lr_scheduler=schedule,
            forward=forward or ForwardStates.of(run_state),
        )
    )


class _TensorPickler(pickle.Pickler):
    """Writes tensors on the host as their bytes: torch's own way makes an archive of each, ten times slower."""

    @override
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or not value.numel() or value.requires_grad:
            return NotImplemented
        flat = value.contiguous().view(-1)
        return _tensor_of, (bytes(bytes_of(flat)), value.dtype, tuple(value.shape))


def _tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _pickled(states: SmallStates) -> bytes:
    written = io.BytesIO()
    _TensorPickler(written).dump(states)
    return written.getvalue()


def _scalars(run_state: RunState) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    optimizer = run_state.torch_optimizer
    assert optimizer is not None, "elasticity.continue needs an optimizer"
    for master in run_state.runtime.masters:
        for run in master.runs:
            state = optimizer.state.get(run.param) or {}
            if state:
                names = tuple(master.layout.tiles[tile].logical for tile, _, _ in master.tile_spans(run.span))
                yield (
                    names,
                    {
                        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                        for key, value in state.items()
                        if not is_per_element(value, run.param)
                    },
                )


def _own_ranges(run_state: RunState, left_out: frozenset[str]) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """Yields kind, bucket, first element and values (1-D views) of this rank's part of all that is not left out."""
    for bucket in run_state.runtime.buckets:
        master = run_state.runtime.master_of(bucket)
        if master is not None:
            yield from _of_master(run_state, bucket.index, master)
        elif bucket.is_sharded or not left_out.issuperset(tile.logical for tile in bucket.layout.tiles):
            lower, upper = bucket.layout.slice_bounds(bucket.transport.rank)
            values = bucket.shard if bucket.is_sharded else bucket.full.tensor[lower:upper]
            yield COMPUTE, bucket.index, lower, values


def _of_master(run_state: RunState, bucket: int, master: MasterBucket) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    lower, _ = master.layout.slice_bounds(master.rank)
    yield MASTER, bucket, lower, master.flat
    assert run_state.torch_optimizer is not None
    for run in master.runs:
        for key, value in (run_state.torch_optimizer.state.get(run.param) or {}).items():
            if is_per_element(value, run.param):
                yield optimizer_kind(key), bucket, lower + run.span.start, value.detach().reshape(-1)


@torch.no_grad()
def copy_states(
    run_state: RunState,
    layout: CopyLayout,
    owner: int,
    held: CopyStore,
    forward: ForwardStates | None = None,
    numbers: Mapping[int, int] | None = None,
) -> StateCopy:
    """Copies this rank's states to host memory.

    Args:
        run_state: The training run, between two steps.
        layout: Of the job.
        owner: Number of this process.
        held: Has memory to spare.
        forward: See :func:`small_states`.
        numbers: Index of each bucket that is copied to its number in ``layout``; None: all are, and have the same.
    """
    runs: dict[str, list[SavedRun]] = {}
    found: list[tuple[SavedRun, torch.Tensor]] = []
    size = 0
    for kind, index, start, values in _own_ranges(run_state, layout.left_out):
        bucket = index if numbers is None else numbers.get(index, -1)
        if values.numel() and bucket >= 0:
            run = SavedRun(bucket, start, start + values.numel(), values.dtype, size)
            runs.setdefault(kind, []).append(run)
            found.append((run, values))
            size += -(-run.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = held.spare(owner, size, layout.epoch)
    for run, values in found:
        memory.data[run.offset : run.offset + run.nbytes].view(run.dtype).copy_(values)
    tupled = {kind: tuple(listed) for kind, listed in runs.items()}
    small = small_states(run_state, forward)
    return StateCopy(run_state.counters["global_steps"], owner, layout, tupled, small, memory.data, memory)


class BuddyLink:
    """Brings the copies of one job to the next rank of its ring, and those of the rank before here.

    A copy is sent the first time that its memory is used. If the buddy finds the same in the memory itself, it keeps
    that open, and later copies there are not sent: only what they are of. A rank makes its copy over the one before the
    last, which no rank needs: it has the message of all ranks on the update, which each gave when it had all copies of
    the one before.

    Args:
        transport: Over host memory.
        held: Has memory to spare.
    """

    def __init__(self, transport: Transport, held: CopyStore) -> None:
        self._transport = transport
        self._held = held
        self._opened: dict[int, torch.Tensor] = {}  # memory of the rank before, by its serial number
        self.sent = 0
        """Bytes of model states sent."""

    def exchange(self, copy: StateCopy) -> StateCopy | None:
        """Hands over a copy of this rank, and returns that of the rank before. Every rank of the job must call it.

        Returns:
            None where there is no other rank.
        """
        transport, owners = self._transport, copy.layout.owners
        rank, size = transport.rank, transport.size
        if size == 1:
            return None
        ring = copy.layout.ring
        place = ring.index(rank)
        following, before = ring[(place + 1) % size], ring[place - 1]
        address = copy.memory.address if copy.memory is not None else None
        words = pickle.dumps((copy.generation, copy.runs, copy.small, address))
        header = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        lengths = torch.tensor([header.numel(), copy.data.numel()])
        opened = torch.tensor([*self._opened, -1, -1][:_KEPT])
        theirs, opened_there = torch.zeros_like(lengths), torch.zeros_like(opened)
        doing = "copies of model states for the buddy"
        transport.move(
            [
                TensorTransfer(rank, following, lengths),
                TensorTransfer(rank, before, opened),
                TensorTransfer(before, rank, theirs),
                TensorTransfer(following, rank, opened_there),
            ],
            label=doing,
        )
        received = torch.empty(int(theirs[0]), dtype=torch.uint8)
        transport.move([TensorTransfer(rank, following, header), TensorTransfer(before, rank, received)], label=doing)
        generation, runs, small, source = pickle.loads(received.numpy().tobytes())
        data = self._opened.get(source.serial) if source is not None else None
        memory, moved = None, []
        if data is None:
            memory = self._held.spare(owners[before], int(theirs[1]), copy.layout.epoch)
            data = memory.data
            moved.append(TensorTransfer(before, rank, data))
        else:
            self._held.drop_oldest(owners[before], copy.layout.epoch)
        if address is None or address.serial not in opened_there.tolist():
            moved.append(TensorTransfer(rank, following, copy.data))
            self.sent += copy.data.numel()
        transport.move(moved, label=doing)
        if memory is not None and source is not None and (found := open_memory(source, data)) is not None:
            self._opened = dict([*self._opened.items(), (source.serial, found)][-_KEPT:])
            data, memory = found, None
        return StateCopy(generation, owners[before], copy.layout, runs, small, data, memory)
