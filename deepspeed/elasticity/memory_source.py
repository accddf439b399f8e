"""Copies in the host memory of several ranks as a checkpoint that can be read.

The loader asks for intervals by name, whatever the layout (``checkpoint.plan``). Which copies have them is arithmetic;
what lies on other ranks is fetched in one exchange before anything is changed.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed.checkpoint.disk import bytes_of
from deepspeed.checkpoint.format import Manifest, SavedFile, SavedRun
from deepspeed.checkpoint.reader import CheckpointReader, FileReader, windows
from deepspeed.checkpoint.source import Wanted
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.comm.transports.transport import TensorTransfer, Transport
from deepspeed.elasticity.copies import CopyLayout, StateCopy

_WHERE = Path("copies in host memory")


@dataclass(frozen=True)
class CopyOnRank:
    """A copy that some rank of the new job holds.

    Attributes:
        kept_by: The rank.
        owner: Number of the member whose states they are.
        runs: Where each stretch lies in its bytes, by kind.
        small: Pickled small states.
        is_own: The rank is the owner.
    """

    kept_by: int
    owner: int
    runs: dict[str, tuple[SavedRun, ...]]
    small: bytes
    is_own: bool


class MemoryFile(FileReader):
    """Bytes of a copy, of which this rank may hold all, or what it has fetched.

    Args:
        record: What the file would be, were it one.
        data: All bytes; None: they are on another rank.
    """

    def __init__(self, record: SavedFile, data: torch.Tensor | None) -> None:
        super().__init__(_WHERE, record)
        self._data = data
        self._starts: list[int] = []
        self._fetched: list[torch.Tensor] = []

    @property
    def is_here(self) -> bool:
        """Whether this rank holds all of it."""
        return self._data is not None

    def keep(self, start: int, data: torch.Tensor) -> None:
        """Keeps bytes that were fetched (uint8, 1-D), from byte ``start`` on."""
        place = bisect.bisect(self._starts, start)
        self._starts.insert(place, start)
        self._fetched.insert(place, data)

    def open(self) -> int:
        """Does nothing."""
        return -1

    def close(self) -> None:
        """Does nothing."""

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fills ``out`` from byte ``offset`` on."""
        data, base = self._data, 0
        if data is None:
            place = bisect.bisect(self._starts, offset) - 1
            data, base = self._fetched[place], self._starts[place]
        start = offset - base
        out[:] = bytes_of(data[start : start + len(out)])


class MemorySource(CheckpointReader):
    """Copies on the ranks of a job, as a :class:`~deepspeed.checkpoint.source.CheckpointSource`.

    Args:
        layout: Of the job that made the copies.
        listed: All copies that the ranks of this job hold.
        mine: Those of this rank, by owner.
        rank: This rank.
    """

    def __init__(
        self, layout: CopyLayout, listed: Sequence[CopyOnRank], mine: Mapping[int, StateCopy], rank: int
    ) -> None:
        self._rank = rank
        self._ranks: dict[str, tuple[int, int]] = {}  # rank and owner, by the name of the file
        files: list[SavedFile] = []
        readers: list[MemoryFile] = []
        taken: set[tuple[str, int, int]] = set()
        # What this rank holds goes first, then what its owner holds: buddies serve the dead only.
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
        """Brings everything in ``wanted`` that other ranks hold. Every rank must call it.

        Args:
            wanted: What will be read here.
            transport: Between the ranks, over host memory.
            mine: Copies that this rank holds, by owner.

        Returns:
            Bytes that came to this rank.
        """
        asked: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # stretches of bytes, by rank, owner
        places: list[tuple[MemoryFile, int, int]] = []
        for entry in wanted:
            for window in windows(self.runs_of(entry)):
                reader, start, stop = window[0].reader, window[0].offset, window[-1].end
                assert isinstance(reader, MemoryFile)
                if not reader.is_here:
                    source, owner = self._ranks[reader.record.name]
                    asked[source, owner].append((start, stop))
                    places.append((reader, start, stop))
        doing = "fetching copies of model states"
        everybody = gather_objects(transport, dict(asked), label=doing)
        transfers: list[TensorTransfer] = []
        for reader, start, stop in sorted(places, key=lambda place: self._ranks[place[0].record.name]):
            data = torch.empty(stop - start, dtype=torch.uint8)
            reader.keep(start, data)
            transfers.append(TensorTransfer(self._ranks[reader.record.name][0], transport.rank, data))
        came = sum(stop - start for _, start, stop in places)
        for target, theirs in enumerate(everybody):
            for (source, owner), stretches in sorted(theirs.items()):
                if source == transport.rank and target != transport.rank:
                    data = mine[owner].data
                    transfers += [TensorTransfer(transport.rank, target, data[start:stop]) for start, stop in stretches]
        transport.move(transfers, label=doing)
        return came

    def check(self, wanted: Sequence[Wanted]) -> None:
        """Makes sure that every stretch of ``wanted`` is on some rank.

        Raises:
            CheckpointError: It is not.
        """
        for entry in wanted:
            for _ in self.runs_of(entry, all_of_it=True):
                continue
