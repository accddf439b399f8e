"""Copies of model states in host memory: of this rank's own slices, and of those of the previous rank in a ring.

After a step every rank copies its masters, optimizer states and small states, and sends the copy to another rank, its
*buddy* (``CopyLayout.ring``). The two newest generations are kept, so if a rank is lost while copies are sent, the
previous generation is still complete. If other ranks have the same slices (MiCS), nothing is sent: their own copies are
used. A buddy on the same host opens the memory of the copy, so nothing is sent either. If every rank has all states
(stage 0 of a model of one part), nothing is copied ahead: the states of any remaining rank are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepspeed.checkpoint.collect import is_per_element
from deepspeed.checkpoint.disk import bytes_of
from deepspeed.checkpoint.exchange import Exchange
from deepspeed.checkpoint.format import COMPUTE, MASTER, SavedRun, optimizer_kind
from deepspeed.checkpoint.param_groups import RankGroups
from deepspeed.checkpoint.roster import roster
from deepspeed.checkpoint.run_state import RunState
from deepspeed.checkpoint.states import random_state
from deepspeed.comm.base.encoding import decode, encode
from deepspeed.comm.members.member import RunMember
from deepspeed.comm.members.regroup import ReadyMember
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.comm.transports.transport import TensorTransfer, Transport
from deepspeed.elasticity.copy_memory import CopyMemory
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.storage import distinct
from deepspeed.zero.tiling.layout import BucketLayout
from deepspeed.zero.update.masters import MasterBucket

_ALIGNMENT = 64  # bytes, so that every run begins on a cache line
_KEPT = 2  # generations
_RESERVED = 32  # bytes of address space per element; optimizer states are made at the first update


@dataclass(frozen=True)
class CopyLayout:
    """Describes the layout of the copies of one job; equal on all of its ranks."""

    epoch: int  # the epoch of the job
    owners: tuple[int, ...]  # numbers of its members, by rank
    buckets: tuple[BucketLayout, ...]  # the buckets of the model
    # names of parameters that are not copied because every rank has them: frozen, unsharded ones
    left_out: frozenset[str]
    frozen: frozenset[str]  # names of parameters without gradient
    aliases: dict[str, str]  # further names of tied parameters
    is_whole: bool  # whether each copy holds all states, so that one copy is enough
    # by rank, the number of its part of the model states; ranks with the same number hold the same slices
    parts: tuple[int, ...]
    # Number of parts of the model (tensor- or expert-parallel). Consecutive ranks hold different parts.
    model_parts: int = 1

    @property
    def has_replicas(self) -> bool:
        """Whether every part of the states is on several ranks."""
        return all(self.parts.count(part) > 1 for part in self.parts)

    @property
    def ring(self) -> list[int]:
        """The ranks in an order in which the buddy of each is the next one.

        The buddy usually holds the same part of the model in another replica, so all ranks of one replica (for example
        those of a host) may be lost at once.
        """
        return sorted(range(len(self.owners)), key=lambda rank: (rank % self.model_parts, rank))

    def is_alike(self, owner: int, rank: int) -> bool:
        """Returns whether the small states of ``owner`` equal those of ``rank``, except for states of each process."""
        return self.owners.index(owner) % self.model_parts == rank % self.model_parts

    @classmethod
    def of(cls, run_state: RunState, epoch: int, owners: Sequence[int]) -> CopyLayout:
        """Returns the layout for a model of one part, without communication."""
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
    """Returns the layout for a model of several parts, and the numbers of this rank's buckets in it, by bucket index.

    Parameters that are equal in several parts are copied by one of them. Every rank of the job must call it.

    Args:
        owners: Numbers of its members, by rank.
        model_parts: See :class:`CopyLayout`.
        transport: Between the ranks, over host memory.
    """
    mine = CopyLayout.of(run_state, epoch, owners)
    if run_state.stage == 3:  # with one replica left nothing is sharded, and a spare holds none of these parameters
        mine = replace(mine, left_out=frozenset())
    listed = roster(run_state, Exchange(transport))
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
        is_whole=False,  # ranks may differ by one update, and a rank lacks the states of other parts
        parts=tuple(known.index(found) for _, _, found in gathered),
        model_parts=model_parts,
    )
    return layout, numbers


@dataclass(frozen=True)
class ForwardStates:
    """States of one rank that forwards change. They are restored after an interrupted step."""

    buffers: dict[str, torch.Tensor]  # persistent buffers by name, on the host; expanded dimensions have size 1
    random: dict[str, Any]  # states of the random number generators
    extra_state: dict[str, Any]  # extra state of modules

    @classmethod
    def of(cls, run_state: RunState) -> ForwardStates:
        """Returns a copy of the present states."""
        present = {name: distinct(buffer.detach()) for name, buffer in run_state.buffers().items()}
        buffers = {name: buffer.to("cpu", copy=True) for name, buffer in present.items()}
        return cls(buffers, random_state(), run_state.extra_state())


@dataclass
class SmallStates:
    """States of one rank other than large tensors."""

    counters: dict[str, int]  # the counters of the engine
    optimizer: str | None  # name of the torch optimizer's class
    groups: list[dict[str, Any]]  # hyperparameters of each param group, with the names of its parameters
    # scalar optimizer states of this rank's runs, with the names of their parameters
    scalars: list[tuple[tuple[str, ...], dict[str, Any]]]
    loss_scaler: dict[str, Any] | None  # state of the loss scaler, or None
    skipped_in_a_row: int  # updates skipped since the last applied one
    lr_scheduler: dict[str, Any] | None  # state of the learning-rate schedule, or None
    forward: ForwardStates  # the states that forwards change


@dataclass
class StateCopy:
    """A copy of the states of one rank."""

    generation: int  # the number of updates after which it was made
    owner: int  # number of the member that owns the states
    layout: CopyLayout  # the layout of its job
    runs: dict[str, tuple[SavedRun, ...]]  # the position of each run in ``data``, by kind
    small: bytes  # encoded :class:`SmallStates`
    data: torch.Tensor  # the values as bytes, in host memory


class RankCopyBuffer:
    """The copies of one rank in one job that this process can read: two memories, written alternately.

    Args:
        owner: Number of the member that owns the states.
        memories: The memories of the two generations; another process may write to them.
    """

    def __init__(self, layout: CopyLayout, owner: int, memories: Sequence[CopyMemory] = ()) -> None:
        self.layout = layout
        self.owner = owner
        self.memories = tuple(memories)

    def allocate(self, size: int, capacity: int) -> CopyMemory:
        """Returns memory for a new copy of ``size`` bytes: that of the oldest generation.

        If it is too small, or there is none yet, allocates memory of ``capacity`` bytes instead.
        """
        while len(self.memories) < _KEPT:
            self.memories = (*self.memories, CopyMemory.allocate(capacity))
        oldest = min(self.memories, key=lambda memory: -1 if memory.generation is None else memory.generation)
        oldest.begin()
        if oldest.capacity >= size:
            return oldest
        larger = CopyMemory.allocate(capacity)
        self.memories = tuple(larger if memory is oldest else memory for memory in self.memories)
        return larger

    @property
    def part(self) -> int:
        """The number of the part of the model states, see ``CopyLayout.parts``."""
        return self.layout.parts[self.layout.owners.index(self.owner)]

    @property
    def generations(self) -> list[int]:
        """The generations of the complete copies."""
        return [found for memory in self.memories if (found := memory.generation) is not None]

    def of_generation(self, generation: int) -> StateCopy | None:
        """Returns the complete copy of a generation; None if there is none."""
        for memory in self.memories:
            if memory.generation == generation:
                runs, small = decode(memory.tail)
                return StateCopy(generation, self.owner, self.layout, runs, small, memory.data)
        return None

    @property
    def newest(self) -> CopyMemory:
        """The memory of the newest complete copy. There must be one."""
        return max((m for m in self.memories if m.generation is not None), key=lambda m: m.generation or 0)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(sum(memory.lengths) for memory in self.memories)


class CopyStore:
    """The copies that one process can read: its own, and those of the previous rank in the ring.

    Args:
        number: This process's number among the members.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._held: dict[tuple[int, int], RankCopyBuffer] = {}

    def put(self, copies: RankCopyBuffer) -> None:
        """Stores the copies of an owner; replaces those of the same owner and job."""
        self._held[copies.layout.epoch, copies.owner] = copies

    def of_owner(self, layout: CopyLayout, owner: int) -> RankCopyBuffer:
        """Returns the copies of a member in a job; makes an empty buffer if there is none yet."""
        return self._held.setdefault((layout.epoch, owner), RankCopyBuffer(layout, owner))

    def trim(self, epoch: int) -> None:
        """Drops the copies of all jobs but that of ``epoch``."""
        self._held = {key: copies for key, copies in self._held.items() if key[0] == epoch}

    def clear(self) -> None:
        """Drops all copies."""
        self._held.clear()

    def listed(self) -> list[list[Any]]:
        """Returns ``[[generation, epoch], part, number of parts]`` of each copy, for messages to other members."""
        return [
            [[generation, copies.layout.epoch], copies.part, len(set(copies.layout.parts))]
            for copies in self._held.values()
            for generation in copies.generations
        ]

    def of_key(self, key: tuple[int, int]) -> list[StateCopy]:
        """Returns the copies of a ``(generation, epoch)``, this process's own first."""
        generation, epoch = key
        found = [copies.of_generation(generation) for copies in self._held.values() if copies.layout.epoch == epoch]
        return sorted((copy for copy in found if copy is not None), key=lambda copy: copy.owner != self._number)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(copies.nbytes for copies in self._held.values())


def newest_whole(living: Sequence[RunMember], ready: Mapping[int, ReadyMember]) -> tuple[int, int] | None:
    """Returns the newest ``(generation, epoch)`` of which living members hold all parts; None if there is none."""
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
    """Returns the encoded :class:`SmallStates` of this rank.

    Args:
        forward: The states that forwards change, from before an interrupted step; None: the present ones.

    Raises:
        DeepSpeedConfigError: They hold an object that only code can restore.
    """
    updater, optimizer = run_state.updater, run_state.torch_optimizer
    schedule = run_state.schedule_state()
    names = run_state.group_names()
    hyperparameters = RankGroups.of(optimizer, None).hyperparameters
    states = SmallStates(
        counters=dict(run_state.counters),
        optimizer=type(optimizer).__name__ if optimizer is not None else None,
        groups=[{**group, "params": members} for group, members in zip(hyperparameters, names, strict=True)],
        scalars=list(_scalars(run_state)),
        loss_scaler=updater.loss_scaler.state_dict()
        if updater is not None and updater.loss_scaler is not None
        else None,
        skipped_in_a_row=updater.skipped_in_a_row if updater is not None else 0,
        lr_scheduler=schedule,
        forward=forward or ForwardStates.of(run_state),
    )
    try:
        return encode(states)
    except TypeError as error:
        raise DeepSpeedConfigError(
            "elasticity.continue: expected data in the states of the optimizer, of the learning-rate schedule and of "
            f"modules (get_extra_state), found an object that only code can restore ({error}). Give its data instead"
        ) from error


def _scalars(run_state: RunState) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    optimizer = run_state.torch_optimizer
    assert optimizer is not None, "elasticity.continue needs an optimizer"
    for master in run_state.runtime.masters:
        for run in master.runs:
            state = optimizer.state.get(run.param) or {}
            if state:
                names = tuple(master.layout.tiles[tile].logical for tile, _, _ in master.tile_intervals(run.interval))
                yield (
                    names,
                    {
                        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                        for key, value in state.items()
                        if not is_per_element(value, run.param)
                    },
                )


def _own_ranges(run_state: RunState, left_out: frozenset[str]) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """Yields kind, bucket index, first element and values (1-D views) of this rank's states, without ``left_out``."""
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
                yield optimizer_kind(key), bucket, lower + run.interval.start, value.detach().reshape(-1)


@torch.no_grad()
def copy_states(
    run_state: RunState,
    layout: CopyLayout,
    owner: int,
    held: CopyStore,
    forward: ForwardStates | None = None,
    numbers: Mapping[int, int] | None = None,
) -> int:
    """Copies this rank's states to host memory; returns the number of bytes.

    Args:
        held: Receives the copy, which replaces the older one of the two generations.
        forward: See :func:`small_states`.
        numbers: Maps the index of each copied bucket to its number in ``layout``; None: all are copied, and number and
            index are equal.
    """
    runs: dict[str, list[SavedRun]] = {}
    found: list[tuple[SavedRun, torch.Tensor]] = []
    size = reserved = 0
    for kind, index, start, values in _own_ranges(run_state, layout.left_out):
        bucket = index if numbers is None else numbers.get(index, -1)
        if values.numel() and bucket >= 0:
            run = SavedRun(bucket, start, start + values.numel(), values.dtype, size)
            runs.setdefault(kind, []).append(run)
            found.append((run, values))
            size += -(-run.nbytes // _ALIGNMENT) * _ALIGNMENT
            reserved += _RESERVED * values.numel() if kind == MASTER else 0
    tupled = {kind: tuple(listed) for kind, listed in runs.items()}
    tail = encode((tupled, small_states(run_state, forward)))
    used = size + len(tail)
    memory = held.of_owner(layout, owner).allocate(used, reserved + 2 * used)
    place = memory.begin(size, len(tail))
    for run, values in found:
        place[run.offset : run.offset + run.nbytes].view(run.dtype).copy_(values)
    bytes_of(place)[size:] = tail
    memory.end(run_state.counters["global_steps"])
    return used


class BuddyLink:
    """Makes the copies of each rank of one job available to the next rank of the ring, its buddy.

    A buddy on the same host opens the memory and reads every copy in it without a message. A rank overwrites the older
    of its two copies. No rank needs that one any more: all ranks took part in the latest update, and each did so after
    it had made its copy of the previous generation. A rank sends each copy to a buddy on another host.

    Args:
        transport: Between the ranks, over host memory.
    """

    def __init__(self, transport: Transport, held: CopyStore, layout: CopyLayout) -> None:
        self._transport = transport
        self._held = held
        self._layout = layout
        self._opened: tuple[CopyMemory, ...] | None = None  # this rank's memories that the buddy has opened
        self._seen: list[bool] = []  # by rank, whether it has opened the memory of the previous rank
        self.sent = 0
        """Bytes sent."""

    @property
    def _neighbors(self) -> tuple[int, int]:
        ring = self._layout.ring
        place = ring.index(self._transport.rank)
        return ring[place - 1], ring[(place + 1) % len(ring)]

    @property
    def _own(self) -> RankCopyBuffer:
        return self._held.of_owner(self._layout, self._layout.owners[self._transport.rank])

    @property
    def must_open(self) -> bool:
        """Whether the buddy reads copies from this rank's memory, but has not opened the newest memory yet."""
        if self._opened is None or self._opened == self._own.memories:
            return False
        return self._seen[self._neighbors[1]]

    def open(self) -> None:
        """Opens the memory of the previous rank. Every rank must call it; it returns when all have."""
        transport, (before, _) = self._transport, self._neighbors
        self._opened = self._own.memories
        doing = "opening the memory of copies"
        addresses = gather_objects(transport, [memory.address for memory in self._opened], label=doing)
        found = [CopyMemory.open(address) for address in addresses[before] if address is not None]
        memories = [memory for memory in found if memory is not None]
        is_seen = len(memories) == len(addresses[before])
        if is_seen:
            self._held.put(RankCopyBuffer(self._layout, self._layout.owners[before], memories))
        self._seen = gather_objects(transport, is_seen, label=doing)

    def exchange(self) -> None:
        """Sends this rank's newest copy to its buddy if needed. Every rank of the job must call it after a copy."""
        if self._transport.size == 1:
            return
        if self._opened is None:
            self.open()
        if all(self._seen):
            return
        transport, (before, following) = self._transport, self._neighbors
        sends, receives = not self._seen[following], not self._seen[transport.rank]
        doing = "copies of model states for the buddy"
        copy, leaving, arriving = self._own.newest, [], []
        facts = torch.tensor([copy.generation or 0, *copy.lengths])
        theirs = torch.zeros_like(facts)
        if sends:
            leaving = [TensorTransfer(transport.rank, following, facts)]
        if receives:
            arriving = [TensorTransfer(before, transport.rank, theirs)]
        transport.move([*leaving, *arriving], label=doing)
        generation, data, tail = theirs.tolist()
        if receives:
            copies = self._held.of_owner(self._layout, self._layout.owners[before])
            memory = copies.allocate(data + tail, data + 2 * tail)
            arriving = [TensorTransfer(before, transport.rank, memory.begin(data, tail))]
        if sends:
            leaving = [TensorTransfer(transport.rank, following, copy.content)]
            self.sent += copy.content.numel()
        transport.move([*leaving, *arriving], label=doing)
        if receives:
            memory.end(generation)
