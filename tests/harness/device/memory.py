"""Memory as the checker sees it: every storage as ranges of bytes, each with its last write and the reads since.

A *finding* is a read that is not ordered after the last write, a write that is not ordered after the last write and the
reads since, a read of what nobody has written, or memory that may be given to somebody else while it is in use. It is a
sentence that names both places. Findings are collected, not raised: the values are right (everything runs at once on
the CPU), so the program continues and one run shows all there are.
"""

import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from tests.harness.device.allocator import DeviceAllocator, DeviceBlock, PinnedAllocator, PinnedBlock
from tests.harness.device.clocks import Actor, Clocks
from tests.harness.device.jobs import Job, unfinished
from tests.harness.device.places import Place

Ranges = Sequence[tuple[int, int]]
Access = tuple[int, Place]
"""Number of the piece of work, and where it was requested."""


class _ByteRange:
    """Bytes from ``start`` to the next range, which have the same history."""

    __slots__ = ("reads", "start", "write")

    def __init__(self, start: int, write: tuple[Actor, Access] | None, reads: dict[Actor, Access]) -> None:
        self.start = start
        self.write = write
        self.reads = reads


class Block:
    """The memory of one storage.

    Attributes:
        on_device: Whether it is the device's.
        pages: Of host memory: ``"plain"``, ``"pinned"`` by torch (whose allocator waits for copies before it hands
            memory out again) or ``"registered"`` with the driver (nobody waits).
        made: Where it was allocated.
        owner: Device memory: the stream it was allocated on, which alone orders its next use.
        part: What the allocator of device memory or of pinned memory has handed out for it.
        lent: Device memory: the streams that ``record_stream`` named.
        disk: The actor of its transfers to and from a file.
        jobs: Transfers of other threads that read or write it and may not be over.
        is_blank: Device memory whose first values are whatever was there, so reading them is a finding too. Host memory
            is not held to that: buffers for files are written in whole pages.
    """

    def __init__(self, nbytes: int, *, on_device: bool, made: Place, owner: Actor | None) -> None:
        self.nbytes = nbytes
        self.on_device = on_device
        self.pages = "plain"
        self.made = made
        self.owner = owner
        self.part: DeviceBlock | PinnedBlock | None = None
        self.lent: set[Actor] = set()
        self.disk: Actor | None = None
        self.jobs: tuple[Job, ...] = ()
        self.is_blank = False
        self._byte_ranges = [_ByteRange(0, None, {})]

    def describe(self) -> str:
        kind = "device" if self.on_device else {"plain": "host"}.get(self.pages, "page-locked host")
        return f"{kind} memory"

    def _split(self, at: int) -> int:
        """Returns the index of the range that begins at ``at``. Splits a range if none does."""
        byte_ranges = self._byte_ranges
        index = bisect_right(byte_ranges, at, key=lambda byte_range: byte_range.start) - 1
        found = byte_ranges[index]
        if found.start == at:
            return index
        byte_ranges.insert(index + 1, _ByteRange(at, found.write, dict(found.reads)))
        return index + 1

    def touch(
        self, ranges: Ranges, actor: Actor, access: Access, *, writes: bool, clash: Callable[[str, Actor, Place], None]
    ) -> bool:
        """Notes an access, and calls ``clash`` for every earlier one that it is not ordered after.

        Returns:
            Whether all that is read has been written.
        """
        is_whole = True
        for start, stop in ranges:
            if start >= stop:
                continue
            first = self._split(start)
            last = self._split(stop) if stop < self.nbytes else len(self._byte_ranges)
            for byte_range in self._byte_ranges[first:last]:
                if byte_range.write is not None:
                    writer, (time, place) = byte_range.write
                    if not actor.has_seen(writer, time):
                        clash("write", writer, place)
                if writes:
                    for reader, (time, place) in byte_range.reads.items():
                        if not actor.has_seen(reader, time):
                            clash("read", reader, place)
                else:
                    is_whole = is_whole and (byte_range.write is not None or not self.is_blank)
                    byte_range.reads[actor] = access
            if writes:  # one history from now on
                self._byte_ranges[first:last] = [_ByteRange(start, (actor, access), {})]
        return is_whole

    @property
    def is_unwritten(self) -> bool:
        """Returns whether nobody has written any of it."""
        return self.is_blank and all(byte_range.write is None for byte_range in self._byte_ranges)

    def last_uses(self) -> list[tuple[Actor, Access]]:
        """Returns the last use of every actor."""
        found: dict[Actor, Access] = {}
        for byte_range in self._byte_ranges:
            uses = [*byte_range.reads.items(), *([byte_range.write] if byte_range.write is not None else [])]
            for actor, access in uses:
                if actor not in found or found[actor][0] < access[0]:
                    found[actor] = access
        return list(found.items())


class _Alive(weakref.ref[Any]):
    __slots__ = ("key",)
    key: int


class Memory:
    """All storages, by the address of torch's object, and what was found.

    Attributes:
        findings: Sentences.
        device: Torch's allocator of device memory, with its counts.
        pinned: Torch's allocator of page-locked memory, with its counts.
        registered: Bytes of pages that the package has registered with the driver.
        most_registered: The most there were.
    """

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.device = DeviceAllocator(clocks.over_on)
        self.pinned = PinnedAllocator(clocks.over_on)
        self.registered = self.most_registered = 0
        self.findings: list[str] = []
        self._blocks: dict[int, Block] = {}
        self._alive: dict[int, _Alive] = {}
        self._seen: set[object] = set()
        # Freed blocks by owner, with uses that were not over for it then.
        self._loose: list[tuple[Block, Place, list[tuple[Actor, Access]]]] = []
        memory = weakref.ref(self)

        def died(alive: _Alive) -> None:
            found = memory()
            if found is not None:
                found._died(alive)

        self._on_death = died

    def _report(self, key: object, sentence: str) -> None:
        if key not in self._seen:
            self._seen.add(key)
            self.findings.append(sentence)

    def block(self, storage: Any) -> Block | None:
        """Returns what is recorded about a storage's memory; None if the storage was never seen."""
        return self._blocks.get(storage._cdata)

    def on_device(self, storage: Any) -> bool:
        """Returns whether a storage is device memory."""
        found = self._blocks.get(storage._cdata)
        return found is not None and found.on_device

    def know(self, storage: Any, *, on_device: bool) -> Block:
        """Returns the record of a storage's memory; the first call for a storage creates it."""
        key = storage._cdata
        found = self._blocks.get(key)
        if found is None:
            found = self._made(storage.nbytes(), on_device)
            self._blocks[key] = found
            alive = _Alive(storage, self._on_death)
            alive.key = key
            self._alive[key] = alive
        return found

    def _made(self, nbytes: int, on_device: bool) -> Block:
        owner = self.clocks.allocate() if on_device else None
        place = Place("allocated")
        made = Block(nbytes, on_device=on_device, made=place, owner=owner)
        if on_device and nbytes:
            self._hand_out(owner, place)
            made.part = self.device.allocate(nbytes, owner)
        return made

    def pin(self, storage: Any) -> None:
        """Records that torch's allocator of page-locked memory has made a storage."""
        block = self.know(storage, on_device=False)
        block.pages = "pinned"
        if block.nbytes and block.part is None:
            block.part = self.pinned.allocate(block.nbytes)

    def register(self, storage: Any) -> None:
        """Records that the package has registered the pages of a storage with the driver."""
        block = self.know(storage, on_device=False)
        block.pages = "registered"
        self.registered += block.nbytes
        self.most_registered = max(self.most_registered, self.registered)

    def lend(self, block: Block, stream: Actor) -> None:
        """Records that ``stream`` uses a block, whose memory must not be handed out before that is over."""
        if isinstance(block.part, DeviceBlock):
            block.lent.add(stream)
            self.device.record_stream(block.part, stream)
        elif isinstance(block.part, PinnedBlock):
            self.pinned.record_stream(block.part, stream)

    def _hand_out(self, owner: Any, place: Place) -> None:
        """Checks the freed blocks of this stream: the allocator may hand them out again now."""
        for entry in [entry for entry in self._loose if entry[0].owner is owner]:
            self._loose.remove(entry)
            block, freed, uses = entry
            for actor, (time, used) in uses:
                if not owner.has_seen(actor, time):
                    self._report(
                        (freed.key, used.key, actor),
                        f"{block.describe()} ({block.made}) that was freed ({freed}) may be handed out again on "
                        f"{owner} ({place}) before its last use on {actor} ({used}) is over: wait for it, or call "
                        "record_stream",
                    )

    def hold(self, storage: Any, job: Job) -> None:
        """Keeps the bytes of a storage in place until ``job`` is over."""
        block = self.know(storage, on_device=True)
        block.jobs = unfinished(block.jobs, (job,))

    def resized(self, storage: Any, nbytes: int) -> None:
        """Records a ``resize_`` of a storage: what was there is freed, the rest is new.

        Blocks until the transfers of the storage are over. A device frees memory in the order of its streams, but the
        memory of this one is the host's, which is freed at once.
        """
        found = self._blocks.get(storage._cdata)
        if found is None:
            return
        if found.nbytes == nbytes:
            return
        for job in found.jobs:
            job.wait()
        if found.nbytes:
            self._freed(found, Place("resized"))
        fresh = self._made(nbytes, found.on_device)
        fresh.pages = found.pages
        if nbytes and isinstance(found.part, PinnedBlock):
            fresh.part = self.pinned.allocate(nbytes)
        fresh.is_blank = found.on_device
        self._blocks[storage._cdata] = fresh

    def _died(self, alive: _Alive) -> None:
        del self._alive[alive.key]
        block = self._blocks.pop(alive.key)
        if block.nbytes:
            self._freed(block, Place("last reference dropped"))

    def _freed(self, block: Block, place: Place) -> None:
        host = self.clocks.host
        if isinstance(block.part, DeviceBlock):
            self.device.free(block.part)
            owner = block.owner
            assert owner is not None
            owner.follow(host)
            uses = [
                (actor, access)
                for actor, access in block.last_uses()
                if actor is not host and actor not in block.lent and not owner.has_seen(actor, access[0])
            ]
            if uses:
                self._loose.append((block, place, uses))
            return
        if isinstance(block.part, PinnedBlock):
            self.pinned.free(block.part)
            return
        if block.pages == "registered":
            self.registered -= block.nbytes
        for actor, (time, used) in block.last_uses():
            if not host.has_seen(actor, time):
                self._report(
                    (place.key, used.key, actor),
                    f"{block.describe()} ({block.made}) is freed ({place}) before its last use on {actor} ({used}) is "
                    "over: the host must wait for it first",
                )

    def access(self, block: Block, ranges: Ranges, actor: Actor, time: int, place: Place, *, writes: bool) -> None:
        """Notes that ``actor`` reads or writes bytes of a block."""

        def clash(how: str, other: Actor, before: Place) -> None:
            doing = "writes to" if writes else "reads"
            self._report(
                (place.key, before.key, writes, how, actor, other),
                f"{actor} {doing} {block.describe()} ({place}) without being ordered after the {how} on {other} "
                f"({before}); the memory was {block.made}",
            )

        if not block.touch(ranges, actor, (time, place), writes=writes, clash=clash):
            self._report(
                (place.key, block.made.key),
                f"{actor} reads {block.describe()} ({place}) that nobody has written since it was {block.made}",
            )

    def mixed(self, tensor: Any, place: Place, *, writes: bool) -> None:
        """Reports a kernel that got a tensor in host memory."""
        if tensor.dim() == 0 and not writes:
            return
        self._report(
            ("mixed", place.key),
            f"{place} works on device memory and on a host tensor of shape {tuple(tensor.shape)} at once: move one of "
            "them",
        )
