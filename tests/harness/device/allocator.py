"""Torch's caching allocators of device memory and of page-locked host memory, as sizes without memory.

Facts about torch 2 that they follow (torch.cuda's notes on memory management; the constants stand in c10's
``AllocatorConfig.h``): a request is rounded up to 512 bytes. Requests up to 1 MiB come from segments of 2 MiB. Larger
ones come from segments of 20 MiB, or, from 10 MiB on, from a segment of their own size rounded up to 2 MiB. The
smallest free block of the stream that is large enough is taken. It is split if the rest is 512 bytes or more (small
requests) or above 1 MiB (large ones). A freed block joins its free neighbors, and serves only the stream that its
segment was allocated for. A block that ``record_stream`` lent to other streams stays in use until their work of that
time is over.

Page-locked host memory is rounded up to a power of two. A freed block is used again, for a request of the same rounded
size, once the copies that used it are over; it never goes back to the driver.
"""

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
_ROUNDING = 512
_SMALL_REQUEST, _SMALL_SEGMENT = MIB, 2 * MIB
_OWN_SEGMENT, _LARGE_SEGMENT, _LARGE_ROUNDING = 10 * MIB, 20 * MIB, 2 * MIB

Reached = Callable[[], bool]
"""Tells whether the work that was queued on a stream at one moment is over, without waiting for it."""


def _rounded(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


def _segment_size(size: int) -> int:
    if size <= _SMALL_REQUEST:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _OWN_SEGMENT else _rounded(size, _LARGE_ROUNDING)


class DeviceBlock:
    """A part of a segment.

    Attributes:
        address: First byte; segments never touch each other.
        size: Bytes.
        stream: That its segment was allocated for.
        previous: The block before it in the segment.
        next: The block behind it.
        is_free: Whether it may be handed out.
        lent: Streams that ``record_stream`` named.
    """

    __slots__ = ("address", "is_free", "is_small", "lent", "next", "previous", "size", "stream")

    def __init__(self, address: int, size: int, stream: Any, *, is_small: bool) -> None:
        self.address, self.size, self.stream, self.is_small = address, size, stream, is_small
        self.previous: DeviceBlock | None = None
        self.next: DeviceBlock | None = None
        self.is_free = False
        self.lent: dict[Any, None] = {}


class _Returns:
    """Runs what frees memory when no allocation is under way: a garbage collection may free in the middle of one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()

    def put(self, free: Callable[[], None]) -> None:
        self._waiting.append(free)
        if self._lock.acquire(blocking=False):
            try:
                self.run()
            finally:
                self._lock.release()

    def run(self) -> None:
        while self._waiting:
            self._waiting.popleft()()

    def __enter__(self) -> None:
        self._lock.acquire()
        self.run()

    def __exit__(self, *_: object) -> None:
        self.run()
        self._lock.release()


class DeviceAllocator:
    """Hands out blocks of device memory.

    Args:
        event: Returns a function that returns whether the work queued on a stream until now is over.

    Attributes:
        allocated: Bytes of blocks in use.
        reserved: Bytes of all segments.
        allocated_peak: The most that ``allocated`` was since :meth:`reset_peaks`.
        reserved_peak: The most that ``reserved`` was since :meth:`reset_peaks`.
        segments: Segments that were ever asked of the driver.
    """

    def __init__(self, event: Callable[[Any], Reached]) -> None:
        self._event = event
        self.allocated = self.reserved = self.allocated_peak = self.reserved_peak = self.segments = 0
        self._end = 0  # of the address space that has been used
        self._free: dict[tuple[Any, bool], list[tuple[int, int, DeviceBlock]]] = {}
        self._lent: list[tuple[DeviceBlock, list[Reached]]] = []
        self._returns = _Returns()

    def allocate(self, nbytes: int, stream: Any) -> DeviceBlock:
        """Returns a block of at least ``nbytes`` (above 0), for work that is queued on ``stream``."""
        with self._returns:
            self._take_back_lent()
            size = max(_rounded(nbytes, _ROUNDING), _ROUNDING)
            block = self._best_fit(size, stream) or self._new_segment(size, stream)
            self._split(block, size)
            self.allocated += block.size
            self.allocated_peak = max(self.allocated_peak, self.allocated)
            return block

    def record_stream(self, block: DeviceBlock, stream: Any) -> None:
        """Keeps a freed block out of use until what ``stream`` has queued by then is over."""
        if stream is not block.stream:
            block.lent[stream] = None

    def free(self, block: DeviceBlock) -> None:
        """Takes a block back."""
        self._returns.put(lambda: self._take_back(block))

    def empty_cache(self) -> None:
        """Gives whole segments that are free back to the driver."""
        with self._returns:
            self._take_back_lent()
            for pool in self._free.values():
                kept = [entry for entry in pool if entry[2].previous is not None or entry[2].next is not None]
                self.reserved -= sum(size for size, _, _ in pool) - sum(size for size, _, _ in kept)
                pool[:] = kept

    def reset_peaks(self) -> None:
        """Starts the peaks afresh from what is in use and reserved."""
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved

    def _pool(self, block: DeviceBlock) -> list[tuple[int, int, DeviceBlock]]:
        return self._free.setdefault((block.stream, block.is_small), [])

    def _best_fit(self, size: int, stream: Any) -> DeviceBlock | None:
        pool = self._free.get((stream, size <= _SMALL_REQUEST), [])
        index = bisect_left(pool, (size, -1))
        if index == len(pool):
            return None
        block = pool.pop(index)[2]
        block.is_free = False
        return block

    def _new_segment(self, size: int, stream: Any) -> DeviceBlock:
        whole = _segment_size(size)
        block = DeviceBlock(self._end, whole, stream, is_small=size <= _SMALL_REQUEST)
        self._end += whole + _LARGE_ROUNDING
        self.segments += 1
        self.reserved += whole
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return block

    def _split(self, block: DeviceBlock, size: int) -> None:
        rest = block.size - size
        if rest < _ROUNDING or (not block.is_small and rest <= _SMALL_REQUEST):
            return
        block.size = size
        behind = DeviceBlock(block.address + size, rest, block.stream, is_small=block.is_small)
        behind.previous, behind.next = block, block.next
        if block.next is not None:
            block.next.previous = behind
        block.next = behind
        self._put(behind)

    def _put(self, block: DeviceBlock) -> None:
        block.is_free = True
        insort(self._pool(block), (block.size, block.address, block))

    def _take_back(self, block: DeviceBlock) -> None:
        self.allocated -= block.size
        if block.lent:
            self._lent.append((block, [self._event(stream) for stream in block.lent]))
            block.lent = {}
        else:
            self._join(block)

    def _take_back_lent(self) -> None:
        waiting, self._lent = self._lent, []
        for block, events in waiting:
            if all(reached() for reached in events):
                self._join(block)
            else:
                self._lent.append((block, events))

    def _join(self, block: DeviceBlock) -> None:
        for other in (block.previous, block.next):
            if other is None or not other.is_free:
                continue
            pool = self._pool(other)
            del pool[bisect_left(pool, (other.size, other.address))]
            first, second = (other, block) if other is block.previous else (block, other)
            first.size += second.size
            first.next = second.next
            if second.next is not None:
                second.next.previous = first
            block = first
        self._put(block)


class PinnedBlock:
    """Page-locked host memory.

    Attributes:
        size: Bytes, a power of two.
        used_by: Streams that copied from or to it since it was handed out.
    """

    __slots__ = ("size", "used_by")

    def __init__(self, size: int) -> None:
        self.size = size
        self.used_by: dict[Any, None] = {}


class PinnedAllocator:
    """Hands out blocks of page-locked host memory.

    Args:
        event: Returns a function that returns whether the work queued on a stream until now is over.

    Attributes:
        allocations: Blocks that were ever asked of the driver.
        reserved: Their bytes.
        in_use: Bytes of blocks that are handed out.
    """

    def __init__(self, event: Callable[[Any], Reached]) -> None:
        self._event = event
        self.allocations = self.reserved = self.in_use = 0
        self._free: dict[int, list[PinnedBlock]] = {}
        self._waiting: deque[tuple[PinnedBlock, list[Reached]]] = deque()
        self._returns = _Returns()

    def allocate(self, nbytes: int) -> PinnedBlock:
        """Returns a block of at least ``nbytes`` (above 0)."""
        with self._returns:
            self._take_back_reached()
            size = 1 << (nbytes - 1).bit_length()
            free = self._free.get(size)
            if free:
                block = free.pop()
            else:
                block = PinnedBlock(size)
                self.allocations += 1
                self.reserved += size
            self.in_use += size
            return block

    def record_stream(self, block: PinnedBlock, stream: Any) -> None:
        """Keeps a freed block out of use until what ``stream`` has queued by then is over."""
        block.used_by[stream] = None

    def free(self, block: PinnedBlock) -> None:
        """Takes a block back."""
        self._returns.put(lambda: self._take_back(block))

    def _take_back(self, block: PinnedBlock) -> None:
        self.in_use -= block.size
        events = [self._event(stream) for stream in block.used_by]
        block.used_by = {}
        if events:
            self._waiting.append((block, events))
        else:
            self._free.setdefault(block.size, []).append(block)

    def _take_back_reached(self) -> None:
        """In order: a block whose copies are not over keeps those behind it, as torch looks at its events in order."""
        while self._waiting and _all(self._waiting[0][1]):
            block = self._waiting.popleft()[0]
            self._free.setdefault(block.size, []).append(block)


def _all(events: Iterable[Reached]) -> bool:
    return all(reached() for reached in events)
