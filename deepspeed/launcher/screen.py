r"""Shows the output of many ranks as complete labeled lines on one screen.

A line appears when it is complete. Rank 0 is also shown while a line is still being written: a progress bar that
returns to the start of its line (``\r``) or, on a terminal, a prompt. Lines of other ranks that arrive meanwhile are
never mixed into it. All text is bytes: ranks may write any encoding.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque

from deepspeed.logging import JSON_START, takes_color, with_color

_CLEAR_TO_END = b"\x1b[K"
# A write of this size to a pipe that poll calls writable never blocks (POSIX guarantees 512, Linux 4096).
_CHUNK = 512 if select.PIPE_BUF < 4096 else 4096
# Above this many unwritten bytes the ranks' output is not read, so that they block, as on a slow terminal.
_BACKLOG = 1 << 20
# On a terminal an unfinished line without carriage return (a prompt) is shown when nothing has followed it for this
# long; Python writes text and newline separately.
_PARTIAL_SECONDS = 0.3
# An unfinished line is cut here, so that binary output cannot fill the memory.
_LONGEST_LINE = 1 << 20
_JSON_START = JSON_START.encode()  # such a line has the rank, and must stay what it is


def open_standard_streams() -> None:
    """Opens descriptors 0 to 2 if the caller closed them: new pipes must not get these numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


class Output:
    """A queue of bytes for stdout and stderr, written in order without ever blocking on a pipe.

    A blocked launcher could not stop its ranks, so it writes only when the descriptor is ready.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued = 0
        self._broken: set[int] = set()
        self._failed: set[int] = set()

    def put(self, descriptor: int, data: bytes) -> None:
        """Queues ``data`` and writes what can be written now."""
        if descriptor not in self._broken:
            self._queue.append((descriptor, data))
            self._queued += len(data)
        self.flush()

    def flush(self, seconds: float = 0.0) -> None:
        """Writes until the queue is empty, or until nothing could be written for ``seconds``."""
        while self._queue:
            descriptor, data = self._queue[0]
            if not select.select([], [descriptor], [], seconds)[1]:
                return
            try:
                written = os.write(descriptor, data[:_CHUNK])
            except ConnectionError:  # the reader has closed the pipe or connection
                self._give_up(descriptor)
                continue
            except BlockingIOError:  # another process made the descriptor non-blocking and filled it
                return
            except OSError as error:  # such as a full disk, which is no reason to end the ranks
                self._report_loss(descriptor, error)
                written = len(data)
            self._queued -= written
            if written == len(data):
                self._queue.popleft()
            else:
                self._queue[0] = (descriptor, data[written:])

    def finish(self, seconds: float) -> None:
        """Writes the queue; data for a descriptor that accepts nothing for ``seconds`` is lost."""
        while self._queue:
            blocked = self._queue[0][0]
            self.flush(seconds)
            if self._queue and self._queue[0][0] == blocked:
                self._give_up(blocked)

    def _report_loss(self, descriptor: int, error: OSError) -> None:
        """Queues a line for stderr, once for each descriptor, that output of it is lost."""
        if descriptor not in self._failed:
            self._failed.add(descriptor)
            stream = "standard error" if descriptor == 2 else "standard output"
            line = f"deepspeed: cannot write to {stream}: {error.strerror}; lines are lost until it can be written\n"
            self._queue.append((2, line.encode()))
            self._queued += len(line.encode())

    def _give_up(self, descriptor: int) -> None:
        self._broken.add(descriptor)
        self._queue = deque(item for item in self._queue if item[0] != descriptor)
        self._queued = sum(len(data) for _, data in self._queue)

    @property
    def is_full(self) -> bool:
        """Returns whether the output of ranks must not be read for now."""
        return self._queued > _BACKLOG

    @property
    def is_broken(self) -> bool:
        """Returns whether a reader of the output has closed it."""
        return bool(self._broken)

    @property
    def is_abandoned(self) -> bool:
        """Returns whether the other end of stdout or stderr, a pipe or connection, is closed; needs no write."""
        poll = select.poll()
        for descriptor in (1, 2):
            poll.register(descriptor, 0)  # errors and hang-ups are always reported
        return bool(poll.poll(0))


class Screen:
    """Combines lines of several sources on one screen.

    At most one line per surface is *open* (shown but not finished). A surface is a terminal or file: stdout and stderr
    are one surface when both lead to the same.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._surface = {descriptor: _surface(descriptor) for descriptor in (1, 2)}
        self._clear = {descriptor: _CLEAR_TO_END if os.isatty(descriptor) else b"" for descriptor in (1, 2)}
        self._open: dict[tuple[int, int, int], tuple[RankStream, bytes]] = {}

    def line(self, source: RankStream | None, descriptor: int, text: bytes) -> None:
        """Shows a complete line (of the launcher itself if ``source`` is None); ends the open line of the source."""
        surface, clear = self._surface[descriptor], self._clear[descriptor]
        colored = text
        if clear and takes_color(True) and text.startswith(b"["):  # a rank writes into a pipe and sees no terminal
            colored = with_color(text.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        label = source.label if source and not text.startswith((source.label, _JSON_START)) else b""
        labeled = label + colored
        owner, shown = self._open.pop(surface, (None, b""))
        if owner is None:
            data = labeled + b"\n"
        elif owner is source and text.startswith(shown):
            data = text[len(shown) :] + b"\n"
        elif owner is source:
            data = b"\r" + labeled + clear + b"\n"
        elif clear:  # a terminal: remove the open line, show this one, and show the open one again below
            self._open[surface] = (owner, shown)
            data = b"\r" + clear + labeled + b"\n" + owner.label + shown
        else:
            data = b"\n" + labeled + b"\n"
        self._output.put(descriptor, data)

    def open(self, source: RankStream, descriptor: int, text: bytes) -> None:
        """Shows the current state of an unfinished line."""
        surface = self._surface[descriptor]
        owner, shown = self._open.get(surface, (None, b""))
        if owner is source and text.startswith(shown):
            data = text[len(shown) :]
        elif owner is source:
            data = b"\r" + source.label + text + self._clear[descriptor]
        else:
            data = (b"" if owner is None else b"\n") + source.label + text
        self._open[surface] = (source, text)
        if data:
            self._output.put(descriptor, data)

    def is_terminal(self, descriptor: int) -> bool:
        """Returns whether ``descriptor`` is a terminal, where an unfinished line can be removed."""
        return bool(self._clear[descriptor])

    def close(self) -> None:
        """Finishes every open line."""
        for descriptor in (2, 1):
            if self._open.pop(self._surface[descriptor], None) is not None:
                self._output.put(descriptor, b"\n")


def _surface(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_rdev


class RankStream:
    """Cuts one output stream (``descriptor`` 1 or 2) of one rank into lines; rank 0 is shown live."""

    def __init__(self, rank: int, descriptor: int, label: bytes, screen: Screen) -> None:
        self.rank = rank
        self.descriptor = descriptor
        self.label = label
        self._screen = screen
        self._pending = b""
        self._partial_due: float | None = None

    def feed(self, data: bytes) -> None:
        """Adds data that the rank wrote."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            self.emit(_last_rewrite(line))
        self._partial_due = None
        if b"\r" in self._pending:
            # Only the newest state of a rewritten line is stored, which also bounds memory.
            newest = _last_rewrite(self._pending)
            self._pending = newest + (b"\r" if self._pending.endswith(b"\r") else b"")
            self.emit_partial(newest)
        elif len(self._pending) > _LONGEST_LINE:
            self.finish()
        elif self._pending:
            self._partial_due = time.monotonic() + _PARTIAL_SECONDS

    def tick(self, now: float) -> None:
        """Shows an unfinished line that has waited long enough; on terminals only, as a file would keep both states."""
        if self._partial_due is not None and now >= self._partial_due:
            self._partial_due = None
            if self._screen.is_terminal(self.descriptor):
                self.emit_partial(self._pending)

    def finish(self) -> None:
        """Treats pending data as a complete line, when the stream has ended."""
        text, self._pending, self._partial_due = _last_rewrite(self._pending), b"", None
        if text:
            self.emit(text)

    def emit(self, text: bytes) -> None:
        """Shows a complete line."""
        self._screen.line(self, self.descriptor, text)

    def emit_partial(self, text: bytes) -> None:
        """Shows an unfinished line, if this stream is shown live."""
        if self.rank == 0:
            self._screen.open(self, self.descriptor, text)


def _last_rewrite(line: bytes) -> bytes:
    """Returns what a terminal shows of a line with carriage returns: its last non-empty part."""
    if b"\r" not in line:
        return line
    parts = [part for part in line.split(b"\r") if part]
    return parts[-1] if parts else b""
