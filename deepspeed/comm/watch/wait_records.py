"""Records of waits, as ranks post them: the records, cycles among them, and messages for failures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_ADVICE = " | "  # in a label: the text after it names what to change if ranks wait for each other
_ALIKE = (
    "Every rank must use the same modules and make the same calls. If ranks use different modules of a model at ZeRO "
    'stage 3, set zero_optimization.agreement to "serve", mark the module that holds both branches with '
    "deepspeed.utils.set_z3_leaf_modules so that it is gathered whole, or make the branch depend on data that is equal "
    "on all ranks. If they run unequal numbers of forwards (generation to unequal lengths), pass synced_gpus=True to "
    "generate(), or let every rank run as many as the longest one"
)
_MOST_LISTED = 8  # ranks that a warning names


def with_advice(label: str, advice: str) -> str:
    """Returns the label of an exchange that only one kind of call makes.

    If ranks wait for each other and one of them waits in this exchange, the error gives ``advice``, which names the
    calls that must be equal on all ranks, instead of the general advice about modules.
    """
    return f"{label}{_ADVICE}{advice}"


@dataclass(frozen=True)
class WaitRecord:
    """Describes the transfer that a rank waits for."""

    channel: str  # the channel of the transfer
    index: int  # its number on the channel
    members: tuple[int, ...]  # the ranks that take part in it
    label: str  # describes the transfer; may come from :func:`with_advice`
    since: float  # start of the wait, in seconds of the monotonic clock
    on_stream: bool = False  # whether the transfer runs on a stream of the device, behind all that was queued before it
    gives_up: bool = False  # whether the wait times out and the rank continues, so that it cannot be part of a deadlock

    @property
    def words(self) -> str:
        """The label without advice."""
        return self.label.partition(_ADVICE)[0]


def exit_notice_of(awaited: WaitRecord, posts: dict[int, dict[str, Any]]) -> str | None:
    """Returns the message for a rank that has left without issuing the awaited transfer."""
    left = sorted(
        rank
        for rank, post in posts.items()
        if post.get("has_left") and post["issued"].get(awaited.channel, 0) < awaited.index and rank in awaited.members
    )
    if not left:
        return None
    who = f"rank {left[0]} has" if len(left) == 1 else f"ranks {', '.join(map(str, left))} have"
    return (
        f"{who} ended while this rank waits for {awaited.words}. If no error is shown there, that program came to its "
        "end too early: every rank must make the same calls, so look for a loop over fewer batches, a skipped step or "
        "an early exit"
    )


def words_for_dead(rank: int, me: int, awaited: WaitRecord) -> str:
    """Returns the message of rank ``me`` if the process of ``rank`` has ended."""
    return (
        f"the process of rank {rank} has died (killed, crashed without an error message, or ended by os._exit), while "
        f"rank {me} waits for {awaited.words}. Look at the end of the output of rank {rank}, and in the kernel's log "
        "for the out-of-memory killer"
    )


def missing_of(awaited: WaitRecord, posts: dict[int, dict[str, Any]]) -> list[int]:
    """Returns the ranks that take part in the awaited transfer and have not posted that they have issued it."""
    return sorted(
        rank
        for rank, post in posts.items()
        if (rank in awaited.members or not awaited.members)
        and post.get("issued", {}).get(awaited.channel, 0) < awaited.index
    )


def words_for_long_wait(missing: list[int], me: int, awaited: WaitRecord, seconds: float) -> str:
    """Returns the warning of rank ``me`` that the ranks in ``missing`` keep it waiting."""
    listed = ", ".join(map(str, missing[:_MOST_LISTED])) + (", ..." if len(missing) > _MOST_LISTED else "")
    who, has = (f"rank {listed}", "has") if len(missing) == 1 else (f"ranks {listed}", "have")
    return (
        f"rank {me} has waited {seconds:.0f} s for {awaited.words}, which {who} {has} not reached. A rank may be late "
        "(a slow data loader, a long evaluation, a checkpoint) or wait in a call that other ranks do not make. If this "
        f"does not end, look at the output of {who}, or at the stack of that process (py-spy dump --pid)"
    )


def plain_error(error: RuntimeError) -> str:
    """Returns the backend's words without its source lines and advice."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error)).split(" This is typically caused")[0]


def find_cycle(posts: dict[int, dict[str, Any]], first: int) -> list[int]:
    """Returns the ranks of a cycle of waits; empty if there is none.

    Ranks in the same wait are searched once, so the time is linear in the number of posts. These have, by rank, the
    ``channel``, ``index`` and ``members`` of the transfer that it waits for, and how many of each channel it has
    ``issued``. Cycles that rank ``first`` reaches are searched first.
    """
    finished: set[_Wait] = set()
    for start in (first, *posts):
        if cycle := _cycle_from(start, posts, finished):
            return cycle
    return []


# Channel, number, whether on a stream, and the members: equal for all ranks in one wait.
_Wait = tuple[str, int, bool, int]


def _cycle_from(start: int, posts: dict[int, dict[str, Any]], finished: set[_Wait]) -> list[int]:
    """Returns a cycle that ``start`` reaches; a depth-first search over waits, which records those without a cycle."""
    path: list[tuple[_Wait, int, Iterator[int]]] = []  # a wait, a rank in it, and the ranks that this one waits for
    place: dict[_Wait, int] = {}
    rank: int | None = start
    while rank is not None or path:
        post, wait = {} if rank is None else posts.get(rank, {}), None
        if "members" in post and not post.get("gives_up"):
            wait = post["channel"], post["index"], post.get("on_stream", False), id(post["members"])
        if rank is not None and wait is not None and wait not in finished:
            if wait in place:
                return [*(other for _, other, _ in path[place[wait] + 1 :]), rank]
            place[wait] = len(path)
            path.append((wait, rank, _lacking(rank, posts, start)))
        if not path:
            break
        rank = next(path[-1][2], None)
        if rank is None:
            wait = path.pop()[0]
            finished.add(wait)
            del place[wait]
    return []


def _lacking(rank: int, posts: dict[int, dict[str, Any]], first: int) -> Iterator[int]:
    """Returns the ranks that have not issued what ``rank`` waits for, and cannot until their own wait is over.

    A rank whose stream waits while its host continues may still issue transfers on the host; those on the device are
    queued behind the wait. Rank ``first`` comes first, if it is one of them.
    """
    awaited = posts[rank]
    members = set(awaited["members"])
    # Usually only a few of thousands of members have posts.
    for other in sorted((other for other in posts if other in members), key=lambda other: (other != first, other)):
        theirs = posts[other]
        if other == rank or "members" not in theirs or theirs.get("gives_up"):
            continue
        is_held_up = theirs.get("blocks_host", True) or awaited.get("on_stream", False)
        if is_held_up and theirs["issued"].get(awaited["channel"], 0) < awaited["index"]:
            yield other


def sentence_of(waiting: dict[int, str]) -> str:
    """Returns the error of ranks that wait for each other: by rank, the label of what it waits for."""
    split = {rank: label.partition(_ADVICE) for rank, label in sorted(waiting.items())}
    parts = "; ".join(f"rank {rank} waits for {words}" for rank, (words, _, _) in split.items())
    advice = next((advice for _, _, advice in split.values() if advice), None)
    did = "took different branches" if advice is None else "made different calls"
    return f"ranks {did} and wait for each other: {parts}. {advice or _ALIKE}"
