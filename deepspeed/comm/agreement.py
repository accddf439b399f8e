"""Keeps ranks on one order of gathers: never a hang, never garbage.

While an order is recorded, every gather is preceded by a tiny exchange of (segment, position, wish); different wishes
raise the same ``DivergenceError`` on all ranks before any data moves. A rank that follows an agreed order exchanges
nothing. A rank about to leave the order posts its wish in the rendezvous store and waits there for the others. A rank
that waits long for data looks into the store: a post at or before the position it waits for means that the data will
never come, so it posts its own position and all raise, naming both modules. Being late is never an error.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed.comm.transport import LocalTransport, Transport
from deepspeed.errors import CommunicationError, DivergenceError

END_OF_SEGMENT = -1
_OUTSIDE = -2
_FIRST_LOOK = 0.2  # seconds that a wait may last before the store is looked at
_GRACE = 5.0  # seconds in which a failed wait may still turn out to be a divergence


class Agreement:
    """The view of one rank on the agreed order.

    Args:
        transport: Of the group that gathers.
        store: A torch ``Store`` shared by the group, or None where there is none (one rank).
        scope: Prefix of the keys in the store; equal on all ranks, unique to this engine.
        describe: Turns a bucket index into words for messages.
    """

    def __init__(self, transport: Transport, store: Any, scope: str, describe: Callable[[int], str]) -> None:
        self._transport = transport
        self._store = store
        self._scope = scope
        self._describe = describe
        self._segment = 0
        self._kind = "none"
        self._digest = 0
        self._broken: DivergenceError | None = None
        self._position = 0
        if not isinstance(transport, LocalTransport):
            self._watch = _Watch(self)
            transport.guard = self._watch.guard

    @property
    def digest(self) -> int:
        """Checksum of everything issued so far; equal on all ranks that kept the order (below 2**32)."""
        return self._digest

    def begin_segment(self, kind: str) -> None:
        self._segment += 1
        self._kind = kind
        self._position = 0

    def end_segment(self, issued: Sequence[int]) -> None:
        """Adds what the segment issued to the digest."""
        self._digest = zlib.crc32(f"{self._kind}:{issued}".encode(), self._digest)
        self._position = len(issued)

    def exchange(self, position: int, wish: int) -> None:
        """Compares the wishes of all ranks; called by all of them while an order is recorded.

        Raises:
            DivergenceError: The ranks want different things; raised on every rank.
        """
        self._position = position
        if self._transport.size == 1:
            return
        rows = self._transport.gather_small(torch.tensor([self._segment, position, wish], dtype=torch.int64)).tolist()
        if any(row != rows[0] for row in rows):
            raise DivergenceError(self._message([(row[0], self._wording(row[2])) for row in rows]))

    def exchange_alone(self, wish: int) -> None:
        """Like :meth:`exchange`, for a gather outside every segment."""
        self.exchange(0, wish)

    def leave_order(self, position: int, wish: int) -> None:
        """Called by a rank whose wish is not in the rest of the agreed order.

        Returns when all ranks have the same wish at the same position; then the order is recorded again.

        Raises:
            DivergenceError: Some rank goes on differently; raised on every rank.
        """
        self._position = position
        if self._transport.size == 1:
            return
        self._post(position, wish)
        while True:
            posts = self._posts()
            different = [p for p in posts.values() if p["position"] != position or p["wish"] != wish]
            if different:
                raise self._divergence(posts)
            if len(posts) == self._transport.size:
                return
            time.sleep(0.02)

    # -- the store ---------------------------------------------------------------------------------------------------

    def _key(self, segment: int, rank: int) -> str:
        return f"{self._scope}/left/{segment}/{rank}"

    def _post(self, position: int, wish: int) -> None:
        record = {"rank": self._transport.rank, "segment": self._segment, "position": position, "wish": wish}
        self._store.set(self._key(self._segment, self._transport.rank), json.dumps(record))
        self._store.set(f"{self._scope}/someone_left", str(self._segment))

    def _posts(self, segment: int | None = None) -> dict[int, dict[str, int]]:
        segment = self._segment if segment is None else segment
        posts = {}
        for rank in range(self._transport.size):
            key = self._key(segment, rank)
            if self._store.check([key]):
                posts[rank] = json.loads(self._store.get(key))
        return posts

    def left_behind(self) -> DivergenceError | None:
        """For a rank that waits for data: whether another rank has left the order at or before its position."""
        if not self._store.check([f"{self._scope}/someone_left"]):
            return None
        segment = int(self._store.get(f"{self._scope}/someone_left"))
        posts = {rank: post for rank, post in self._posts(segment).items() if rank != self._transport.rank}
        if not posts or segment > self._segment:
            return None
        if segment == self._segment:
            if all(post["position"] > self._position for post in posts.values()):
                return None
            if self._key_posted(segment):
                return None  # this rank left as well; leave_order decides
        self._segment_post(segment)
        return self._divergence(self._posts(segment))

    def _key_posted(self, segment: int) -> bool:
        return bool(self._store.check([self._key(segment, self._transport.rank)]))

    def _segment_post(self, segment: int) -> None:
        record = {"rank": self._transport.rank, "segment": segment, "position": self._position, "wish": _OUTSIDE}
        self._store.set(self._key(segment, self._transport.rank), json.dumps(record))

    # -- words -------------------------------------------------------------------------------------------------------

    def _wording(self, wish: int) -> str:
        if wish == END_OF_SEGMENT:
            return f"the end of the {self._kind}"
        if wish == _OUTSIDE:
            return "went on with the agreed order"
        return self._describe(wish)

    def _divergence(self, posts: dict[int, dict[str, int]]) -> DivergenceError:
        return DivergenceError(
            self._message([(rank, self._wording(post["wish"])) for rank, post in sorted(posts.items())], named=True)
        )

    def _message(self, wishes: list[tuple[int, str]], named: bool = False) -> str:
        lines = [f"rank {rank if named else index}: {wish}" for index, (rank, wish) in enumerate(wishes)]
        return (
            f"ranks took different branches in the {self._kind} (segment {self._segment}, position {self._position}): "
            + "; ".join(lines)
            + ". Under ZeRO stage 3 every rank must use the same modules in the same order. Make the branch depend on "
            "data that is equal on all ranks, or mark the module that holds both branches with "
            "deepspeed.utils.set_z3_leaf_modules so that it is gathered whole"
        )


class _Watch:
    """Supervises blocking waits. A daemon thread looks at the store when one wait lasts long."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._changed = threading.Condition()
        self._waiting_since: float | None = None
        self._found: DivergenceError | None = None
        self._thread: threading.Thread | None = None

    def guard(self, wait: Callable[[], Any], label: str) -> None:
        """Runs ``wait``; raises DivergenceError if what it waits for can never come."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="deepspeed-watch", daemon=True)
            self._thread.start()
        self._waiting_since = time.monotonic()
        try:
            wait()
        except RuntimeError as error:
            raise self._explain(error, label) from error
        finally:
            self._waiting_since = None

    def _explain(self, error: RuntimeError, label: str) -> Exception:
        deadline = time.monotonic() + _GRACE
        while self._found is None and time.monotonic() < deadline:
            try:
                self._found = self._agreement.left_behind()
            except RuntimeError:
                break  # the store is gone with the rank that held it
            if self._found is None:
                time.sleep(0.05)
        if self._found is not None:
            return self._found
        return CommunicationError(f"waiting for {label} failed; a peer has probably died or timed out: {error}")

    def _run(self) -> None:
        while True:
            time.sleep(_FIRST_LOOK)
            since = self._waiting_since
            if since is None or self._found is not None or time.monotonic() - since < _FIRST_LOOK:
                continue
            try:
                found = self._agreement.left_behind()
            except RuntimeError:
                continue  # the waiting thread sees the broken connection itself
            if found is not None:
                self._found = found
                self._agreement._transport.abort()
