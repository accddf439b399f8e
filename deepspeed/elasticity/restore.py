"""Rebuilds an engine on another number of ranks and fills it from the copies in host memory.

The engine stays the same object with the same model, but its ranks hold other slices. The copies of several ranks are
read like a checkpoint (:class:`MemorySource`): the loader requests intervals by name, whatever the layout
(``checkpoint.plan``). All ranks compute which copies contain them. Data on other ranks is fetched in one exchange,
before anything is changed.
"""

from __future__ import annotations

import bisect
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import DisableTorchFunctionSubclass

from deepspeed.checkpoint.disk import bytes_of
from deepspeed.checkpoint.fill import WeightFiller
from deepspeed.checkpoint.format import Manifest, SavedFile, SavedRun
from deepspeed.checkpoint.load import LoadResult
from deepspeed.checkpoint.optimizer_state import OptimizerFiller
from deepspeed.checkpoint.param_groups import choose_groups, schedule_for
from deepspeed.checkpoint.plan import match
from deepspeed.checkpoint.reader import CheckpointReader, FileReader, windows
from deepspeed.checkpoint.run_state import RunState
from deepspeed.checkpoint.source import TrainingState, Wanted
from deepspeed.checkpoint.states import restore_random_state
from deepspeed.comm.base.encoding import decode
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.comm.transports.transport import TensorTransfer, Transport
from deepspeed.elasticity.copies import CopyLayout, CopyStore, SmallStates, StateCopy
from deepspeed.engine.engine import EngineBase
from deepspeed.engine.initialize import build_parts
from deepspeed.engine.resuming import resume_from
from deepspeed.errors import CheckpointError, DeepSpeedError
from deepspeed.logging import logger
from deepspeed.zero.access.whole_buckets import publish
from deepspeed.zero.address import address_of, forget_address
from deepspeed.zero.construction.modules import suspended
from deepspeed.zero.storage import distinct

_WHERE = Path("copies in host memory")


@dataclass(frozen=True)
class CopyOnRank:
    """A copy that some rank of the new job holds."""

    kept_by: int  # the rank that holds the copy
    owner: int  # number of the member that owns the states
    runs: dict[str, tuple[SavedRun, ...]]  # the position of each run in its bytes, by kind
    small: bytes  # encoded :class:`SmallStates`
    is_own: bool  # whether the rank is the owner


class MemoryFile(FileReader):
    """A copy that is read like a checkpoint file. This rank holds all of its bytes, or those it has fetched.

    Args:
        data: All bytes, 1-D uint8; None: they are on another rank.
    """

    def __init__(self, record: SavedFile, data: torch.Tensor | None) -> None:
        super().__init__(_WHERE, record)
        self._data = data
        self._starts: list[int] = []
        self._fetched: list[torch.Tensor] = []

    @property
    def is_here(self) -> bool:
        """Whether this rank holds all bytes."""
        return self._data is not None

    def keep(self, start: int, data: torch.Tensor) -> None:
        """Stores fetched bytes (1-D uint8) that start at byte ``start`` of the file."""
        place = bisect.bisect(self._starts, start)
        self._starts.insert(place, start)
        self._fetched.insert(place, data)

    def open(self) -> int:
        """Does nothing; returns -1, which is no file descriptor."""
        return -1

    def close(self) -> None:
        """Does nothing."""

    def read_into(self, offset: int, out: memoryview) -> None:
        """Copies bytes into ``out``, starting at byte ``offset`` of the file."""
        data, base = self._data, 0
        if data is None:
            place = bisect.bisect(self._starts, offset) - 1
            data, base = self._fetched[place], self._starts[place]
        start = offset - base
        out[:] = bytes_of(data[start : start + len(out)])


class MemorySource(CheckpointReader):
    """Copies on the ranks of a job.

    Args:
        layout: The layout of the job that made the copies.
        listed: All copies that the ranks of this job hold.
        mine: Those of this rank, by owner.
    """

    def __init__(
        self, layout: CopyLayout, listed: Sequence[CopyOnRank], mine: Mapping[int, StateCopy], rank: int
    ) -> None:
        self._rank = rank
        self._ranks: dict[str, tuple[int, int]] = {}  # rank and owner, by the name of the file
        files: list[SavedFile] = []
        readers: list[MemoryFile] = []
        taken: set[tuple[str, int, int]] = set()
        # Prefers copies on this rank, then those on their owner. So a buddy sends only copies of lost members.
        for copy in sorted(listed, key=lambda each: (each.kept_by != rank, not each.is_own, each.kept_by)):
            for kind, runs in copy.runs.items():
                new = tuple(run for run in runs if (kind, run.bucket, run.start) not in taken)
                taken.update((kind, run.bucket, run.start) for run in new)
                name = f"rank{copy.kept_by:05d}-{copy.owner}-{kind}"
                size = max((run.offset + run.nbytes for run in new), default=0)
                record = SavedFile(name, kind, size, (), new)
                files.append(record)
                self._ranks[name] = copy.kept_by, copy.owner
                readers.append(MemoryFile(record, mine[copy.owner].data if copy.kept_by == rank else None))
        manifest = Manifest(layout.buckets, tuple(files), {}, layout.aliases, layout.left_out, layout.frozen)
        super().__init__(_WHERE, verify=False, manifest=manifest, files=readers)

    def fetch(self, wanted: Sequence[Wanted], transport: Transport, mine: Mapping[int, StateCopy]) -> int:
        """Fetches the ranges of ``wanted`` that other ranks hold. Every rank must call it.

        Args:
            wanted: The intervals that this rank will read.
            transport: Between the ranks, over host memory.
            mine: Copies that this rank holds, by owner.

        Returns:
            Bytes that this rank has received.
        """
        requested: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # ranges of bytes, by rank, owner
        places: list[tuple[MemoryFile, int, int]] = []
        for entry in wanted:
            for window in windows(self.runs_of(entry)):
                reader, start, stop = window[0].reader, window[0].offset, window[-1].end
                assert isinstance(reader, MemoryFile)
                if not reader.is_here:
                    source, owner = self._ranks[reader.record.name]
                    requested[source, owner].append((start, stop))
                    places.append((reader, start, stop))
        doing = "fetching copies of model states"
        everybody = gather_objects(transport, dict(requested), label=doing)
        transfers: list[TensorTransfer] = []
        for reader, start, stop in sorted(places, key=lambda place: self._ranks[place[0].record.name]):
            data = torch.empty(stop - start, dtype=torch.uint8)
            reader.keep(start, data)
            transfers.append(TensorTransfer(self._ranks[reader.record.name][0], transport.rank, data))
        received = sum(stop - start for _, start, stop in places)
        for target, theirs in enumerate(everybody):
            for (source, owner), ranges in sorted(theirs.items()):
                if source == transport.rank and target != transport.rank:
                    data = mine[owner].data
                    transfers += [TensorTransfer(transport.rank, target, data[start:stop]) for start, stop in ranges]
        transport.move(transfers, label=doing)
        return received

    def check(self, wanted: Sequence[Wanted]) -> None:
        """Checks that some rank holds every range of ``wanted``.

        Raises:
            CheckpointError: No rank holds a range.
        """
        for entry in wanted:
            for _ in self.runs_of(entry, all_of_it=True):
                continue


@dataclass(frozen=True)
class _CopyTable:
    """The copies that a rank holds, as sent to the other ranks."""

    layout: CopyLayout | None
    copies: list[CopyOnRank]


def restore(
    engine: Any,
    run_state: RunState,
    held: CopyStore,
    key: tuple[int, int],
    number: int,
    transport: Transport,
    draws_alike: Sequence[int],
) -> int:
    """Fills an engine from copies. Every rank of the job must call it.

    Args:
        key: ``(generation, epoch)`` of the copies to use.
        number: This process's number among the members.
        transport: Between the ranks, over host memory.
        draws_alike: Numbers of the members that must draw the same random numbers (tensor-parallel ranks), this process
            included. They continue with the random states of the first of them that has a copy.

    Returns:
        Bytes received from other ranks.

    Raises:
        CheckpointError: The copies do not fit the model.
    """
    kept = held.of_key(key)
    mine = {copy.owner: copy for copy in kept}
    tables: list[_CopyTable] = gather_objects(
        transport, _table_of_own_copies(kept, number, transport.rank), label="listing copies"
    )
    layout = next((each.layout for each in tables if each.layout is not None), None)
    if layout is None:
        raise CheckpointError(
            f"elasticity.continue: expected copies of model states of generation {key[0]} on some rank, found none. "
            "Start the run again from its last checkpoint"
        )
    listed = [copy for each in tables for copy in each.copies]
    source = MemorySource(layout, listed, mine, transport.rank)
    smalls = {copy.owner: copy.small for copy in sorted(listed, key=lambda each: not each.is_own)}
    alike = next(owner for owner in smalls if layout.is_alike(owner, transport.rank))
    own = decode(smalls.get(number, smalls[alike]))
    state = _training_state(own, listed, layout)
    shapes = {name: shape for name, shape in run_state.shapes().items() if name not in layout.left_out}
    matches, _, difference = match(source, shapes, run_state.aliases(), {})
    if difference.missing or difference.shapes:
        raise CheckpointError(f"the copies in host memory do not fit the model:\n{difference.table()}")
    weights = WeightFiller(run_state.runtime, source, matches)
    optimizer = OptimizerFiller(run_state, source, state, matches)
    optimizer.check()
    wanted = weights.wanted() + optimizer.wanted()
    source.check(wanted)
    received = source.fetch(wanted, transport, mine)
    optimizer.cut_runs()
    weights.fill()
    optimizer.fill()
    _restore_small(run_state, own, state, matches)
    publish(run_state.runtime)
    if run_state.runtime.reducer is not None:
        run_state.runtime.reducer.clear()
    resume_from(engine, LoadResult(_WHERE, {}, dict(state.counters), len(layout.owners), 1))
    drawn = next((decode(smalls[owner]) for owner in draws_alike if owner in smalls), None)
    if drawn is not None:
        restore_random_state(drawn.forward.random)
    return received


def _table_of_own_copies(kept: list[StateCopy], number: int, rank: int) -> _CopyTable:
    copies = [CopyOnRank(rank, copy.owner, copy.runs, copy.small, copy.owner == number) for copy in kept]
    return _CopyTable(kept[0].layout if kept else None, copies)


def _training_state(own: SmallStates, listed: list[CopyOnRank], layout: CopyLayout) -> TrainingState:
    scalars: dict[str, dict[str, Any]] = {}
    for copy in listed:
        small: SmallStates = decode(copy.small)
        for names, values in small.scalars:
            scalars.update({name: dict(values) for name in names})
    return TrainingState(
        counters=own.counters,
        world_size=len(layout.owners),
        optimizer=own.optimizer,
        param_groups=own.groups,
        scalars=scalars,
        loss_scaler=own.loss_scaler,
        skipped_in_a_row=own.skipped_in_a_row,
        lr_scheduler=own.lr_scheduler,
    )


@torch.no_grad()
def _restore_small(run_state: RunState, own: SmallStates, state: TrainingState, matches: Any) -> None:
    for name, buffer in run_state.buffers().items():
        if name in own.forward.buffers:  # those of experts that another rank had are not
            target = distinct(buffer)
            target.copy_(own.forward.buffers[name][tuple(slice(size) for size in target.shape)])
    for key, module in run_state.extra_state_owners().items():
        if key in own.forward.extra_state:
            module.set_extra_state(own.forward.extra_state[key])
    present = run_state.schedule_state()
    if state.lr_scheduler is not None and present is not None:
        choices = choose_groups(state.param_groups, matches, run_state.group_names())
        run_state.lr_scheduler.load_state_dict(
            schedule_for(state.lr_scheduler, present, len(state.param_groups), choices)
        )


def take_apart(engine: EngineBase) -> None:
    """Releases the states of an engine whose job has ended. Not a collective.

    Its parameters have their full shapes afterwards; those that were sharded are zeros until they are filled.
    """
    parameters = list(engine.module.parameters())
    try:
        # Not twice: after a failed rebuild, the second call would empty the parameters.
        if not engine._runtime.is_destroyed:
            engine.destroy()
    except (DeepSpeedError, RuntimeError) as error:  # pending communication cannot complete; everything is freed anyway
        logger.log(logging.DEBUG, "elasticity: the former engine ended with %s", error)
    addresses = [address for parameter in parameters if (address := address_of(parameter)) is not None]
    for owner in {id(a.bucket.owner): a.bucket.owner for a in addresses if a.bucket.is_trained}.values():
        owner.destroy()  # of an engine whose rebuild another loss has interrupted
    for parameter in parameters:
        address = address_of(parameter)
        parameter.grad = None
        if address is None:
            continue
        if address.bucket.is_sharded:
            with torch.no_grad(), DisableTorchFunctionSubclass():
                parameter.__class__ = torch.nn.Parameter
                parameter.data = torch.zeros(address.shape, dtype=address.bucket.dtype, device=address.bucket.device)
        forget_address(parameter)


def build_again(engine: EngineBase) -> None:
    """Rebuilds an engine on the present process group. Every rank of the job must call it.

    New members call ``deepspeed.initialize`` instead, which makes the same collective calls.
    """
    client, config = engine._parts.client, engine.config
    was_training = engine.training
    with suspended():
        parts = build_parts(client, config)
        kind: Any = type(engine)
        kind.__init__(engine, parts)
        engine.training = was_training  # not train(), which would also change layers in another mode than the engine's
        parts.features.finish(engine, client.training_data)
