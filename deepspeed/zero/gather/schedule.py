"""When sharded buckets are gathered: the agreed order, prefetching, and what stays gathered.

Time is divided into *passes*: one outermost forward (training or evaluation) or one backward. What a pass gathers
depends on its *entry*, the module whose forward is the outermost, or through whose outputs a backward comes in. The
first time a pass starts in a given situation it is *recorded*: before each gather all ranks compare which bucket
they want, and at the end that they stopped at the same place. From then on every rank *follows* the recorded order
without an exchange. A rank that skips part of the order still takes part in the skipped gathers, because the others
rely on its slices; a rank that wants something that the rest of the order does not hold *leaves* it, which all ranks
must do alike (see ``zero.gather.agreement``).

A pass may announce, on all ranks alike, buckets that it will not use (layers that are dropped at random): they are not
gathered, and what is learned from such passes is put together (:class:`LearnedOrder`).

Where the agreement *serves* (``zero_optimization.agreement``), ranks may want different buckets. While an order is
recorded, each exchange is followed by the gathers of all that the ranks want; those that no rank needs here are given
back at the end of the pass. A rank that leaves a followed order first takes part in the rest of it, so the others
find everything that they wait for; it is served when they have come to the end of the pass too. Such gathers are
not learned: what one rank needs once is not gathered by all for ever. Ranks that begin a pass with other knowledge
(they enter by another module, or have kept other buckets) record it, and forget that. A rank that begins a training
pass while another one evaluates once more takes part in that evaluation first.

In a backward the first use of any part of a leaf module gathers the whole of it, as its forward did: which part that is
may differ between ranks.
"""

from __future__ import annotations

import itertools
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from deepspeed.errors import require_state
from deepspeed.logging import warn_once
from deepspeed.uncompiled import uncompiled
from deepspeed.zero.bucket import Bucket, State
from deepspeed.zero.gather.agreement import END_OF_PASS, EVALUATION, Agreement, PassMode


@dataclass(frozen=True)
class GatherLimits:
    """Sizes from the configuration, in elements."""

    # Elements that may be in flight ahead of their use (``stage3_prefetch_bucket_size``). The next unit may, regardless
    # of its size, unless this is 0.
    prefetch: int = 50_000_000
    # gathered elements at once, beyond which nothing is prefetched or kept (``stage3_max_live_parameters``); None:
    # 1,000,000,000, or the size of the largest two neighboring units if that is more
    max_live: int | None = None
    # a bucket stays gathered after its forward when its backward is at most this many elements away
    # (``stage3_max_reuse_distance``)
    max_reuse_distance: int = 1_000_000_000


_ANNOUNCED = 2
_LEAST_LIVE = 1_000_000_000  # elements that may be gathered at once where nothing is configured

_UNKNOWN = -1  # entry of a backward that has reached no forward's outputs yet, or never does

Situation = tuple[str, int, frozenset[int]]
"""Kind of pass, number of its entry, and the buckets that are gathered at its start, or would be if none were left
out: equal on all ranks."""


class GatherSchedule:
    """Makes buckets FULL on demand, in one order on all ranks.

    Args:
        buckets: The sharded buckets of the model, in model order.
        leaves: The buckets that each leaf module uses.
        units: For each unit, the indices of its buckets, sharded or not; a bucket in none is a unit by itself.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        agreement: Agreement,
        limits: GatherLimits,
        leaves: Iterable[Iterable[Bucket]] = (),
        units: Iterable[Iterable[int]] = (),
    ) -> None:
        self._buckets = {bucket.index: bucket for bucket in buckets}
        self._units: dict[int, tuple[int, ...]] = {index: (index,) for index in self._buckets}
        for unit in units:
            members = tuple(index for index in unit if index in self._buckets)
            self._units.update(dict.fromkeys(members, members))
        self._count = GatherCount()
        for bucket in buckets:
            bucket.on_change = self._count.change
            self._count.change(bucket.index, bucket.layout.numel, State.SHARDED, bucket.state)
        self._leaf_of = _joined(leaves)
        self._demanded_leaves: set[tuple[int, ...]] = set()  # in this backward
        self._agreement = agreement
        self._limits = limits
        self._max_live = self._limit_of_live(limits)
        self._orders: dict[Situation, LearnedOrder] = {}
        self._skipped: frozenset[int] = frozenset()
        self._situation: Situation | None = None
        self._order: list[int] | None = None  # the order being followed; None while recording
        self._issued: list[int] = []  # in this pass
        self._is_alone = False  # whether the open pass is independent of other ranks
        self._has_decided = False  # whether the ranks have compared their records of the open pass
        self._is_learned = False  # whether the open pass is recorded and will be followed later
        self._kept_after_forward = self._near_their_backward(buckets)

    def _limit_of_live(self, limits: GatherLimits) -> int:
        """Returns how many elements may be gathered at once; warns where the next unit never fits beside another."""
        units = sorted(set(self._units.values()))
        sizes = [sum(self._buckets[index].layout.numel for index in unit) for unit in units]
        pair = max((one + next_one for one, next_one in itertools.pairwise(sizes)), default=0)
        if limits.max_live is None:
            return max(_LEAST_LIVE, pair)
        if limits.prefetch > 0 and limits.max_live < pair:
            warn_once(
                "stage3_max_live_parameters",
                f"zero_optimization.stage3_max_live_parameters={limits.max_live}: the largest two neighboring modules "
                f"have {pair} elements, so some modules are gathered only when they are needed, and computation waits. "
                f"Leave it out, or set it to {pair} or more, if memory allows",
                ranks=[0],
            )
        return limits.max_live

    def _near_their_backward(self, buckets: list[Bucket]) -> frozenset[int]:
        """Returns the buckets that stay gathered between forward and backward: a pure function of layout and limits."""
        kept, later = set(), 0
        for bucket in reversed(buckets):
            numel = bucket.layout.numel
            if 2 * later > self._limits.max_reuse_distance or later + numel > self._max_live:
                break
            kept.add(bucket.index)
            later += numel
        # A leaf is kept whole or not at all: ranks that use the kept part would not request the rest.
        return frozenset(index for index in kept if kept.issuperset(self._leaf_of.get(index, ())))

    def stays_after_forward(self, bucket: Bucket) -> bool:
        """Returns whether a training forward leaves ``bucket`` gathered for its backward."""
        return bucket.index in self._kept_after_forward

    @property
    def expects_no_gather(self) -> bool:
        """Returns whether no pass is open, or the rest of it gathers nothing, by the agreed order."""
        if self._situation is None:
            return True
        return self._order is not None and len(self._issued) >= len(self._order) and not self._agreement.serves

    @property
    def in_pass(self) -> bool:
        """Returns whether a pass is open."""
        return self._situation is not None

    @property
    def kind(self) -> str:
        """Kind of the open pass; empty outside."""
        return self._situation[0] if self._situation else ""

    @property
    def num_issued(self) -> int:
        """Gathers that the open pass has requested."""
        return len(self._issued)

    @property
    def has_orders(self) -> bool:
        """Returns whether some pass has been recorded."""
        return bool(self._orders)

    def forget_orders(self) -> None:
        """Records every pass again; all ranks must do so together."""
        self._orders.clear()

    def skip(self, indices: frozenset[int]) -> None:
        """Leaves these buckets out of forwards and backwards from now on; equal on all ranks, between two forwards."""
        self._skipped = indices & self._buckets.keys()

    # -- passes --------------------------------------------------------------------------------------------------------

    def begin(self, kind: str, entry: int = _UNKNOWN) -> None:
        """Opens a pass. All ranks must open the same one.

        Args:
            kind: ``forward``, ``evaluation`` or ``backward``.
            entry: Number of the module that it enters the model by; a backward learns it from :meth:`enter`.
        """
        require_state(self._situation is None, self, f"no open pass, found {self._situation}")
        self._issued = []
        if not self._buckets:
            self._situation, self._order = (kind, entry, frozenset()), []
            self._agreement.begin_pass(kind)
            return
        full = frozenset(index for index, bucket in self._buckets.items() if bucket.state is State.FULL)
        if kind == "backward":
            full |= self._skipped & self._kept_after_forward
        self._situation = (kind, entry, full)
        self._order = self._known_order()
        self._has_decided = False
        self._demanded_leaves.clear()
        # While everything is kept gathered, a pass gathers nothing, so ranks may differ (a rank that generates may
        # stop earlier than others).
        self._is_alone = kind == EVALUATION and all(bucket.pins for bucket in self._buckets.values())
        if not self._is_alone:
            self._agreement.begin_pass(kind)
        self._show_shapes(True)

    def enter(self, entry: int) -> None:
        """Called when the open backward reaches the outputs of a forward.

        The first one before any gather is its entry.
        """
        assert self._situation is not None
        kind, known, full = self._situation
        if known == _UNKNOWN and not self._issued and not self._has_decided:
            self._situation = (kind, entry, full)
            self._order = self._known_order()

    def _known_order(self) -> list[int] | None:
        assert self._situation is not None
        learned = self._orders.get(self._situation)
        return None if learned is None else learned.without(self._left_out)

    @property
    def _left_out(self) -> frozenset[int]:
        """Buckets that the open pass skips; none in an evaluation."""
        return frozenset() if self.kind == EVALUATION else self._skipped

    def end(self) -> None:
        """Closes the pass: takes part in skipped gathers, and agrees on the order if it was recorded."""
        assert self._situation is not None, "no pass is open"
        if not self._buckets:
            self._situation = None
            self._agreement.end_pass(())
            return
        if self._is_alone:
            self._situation = None
            self._show_shapes(False)
            return
        self._decide_recording()
        if self._order is not None:
            self._issue_rest()
        while (self._order is None or self._agreement.serves) and self._serve(END_OF_PASS):
            continue
        if self._is_learned:
            learned = self._orders.setdefault(self._situation, LearnedOrder())
            learned.learn(self._issued, self._left_out, falls=self.kind == "backward")
        self._agreement.end_pass(self._issued)
        keeps = self._kept_after_forward if self._situation[0] == "forward" else frozenset()
        self._situation = None
        self._forget_announced()
        self._show_shapes(False)
        for bucket in self._buckets.values():
            if bucket.state is State.GATHERING and bucket.index in keeps:
                bucket.finish_gather()  # this rank skipped it, but all ranks must have gathered the same
            elif bucket.state is State.GATHERING:
                bucket.abandon_gather()

    def drop(self) -> None:
        """Forgets an open pass after an exception; its order is not learned."""
        self._situation = None
        self._forget_announced()
        self._show_shapes(False)
        for bucket in self._buckets.values():
            if bucket.state is State.GATHERING:
                bucket.abandon_gather()

    def _show_shapes(self, shown: bool) -> None:
        for bucket in self._buckets.values():
            bucket.show_shapes(shown)

    def _announce(self) -> None:
        """Starts to read shards from a slow tier, one gather ahead."""
        assert self._order is not None
        for index in self._order[len(self._issued) : len(self._issued) + _ANNOUNCED]:
            self._buckets[index].announce()

    def _forget_announced(self) -> None:
        for memory in {id(bucket.memory): bucket.memory for bucket in self._buckets.values()}.values():
            memory.forget()

    # -- gathers -----------------------------------------------------------------------------------------------------

    @uncompiled
    def demand(self, bucket: Bucket) -> None:
        """Makes ``bucket`` FULL and prefetches the next ones of the order."""
        if self._leaf_of and self.kind == "backward":
            self._demand_leaf_of(bucket)
        if bucket.state is State.SHARDED:
            self._issue_up_to(bucket)
        if bucket.state is State.GATHERING:
            self._prefetch(bucket)
            bucket.finish_gather()
        elif self._order is not None:
            # Already FULL (kept since its forward, or pinned): prefetch as after a gather.
            if not self._agreement.serves:
                self._decide_recording()  # makes no exchange
            if self._has_decided:
                self._prefetch(bucket)

    def _demand_leaf_of(self, bucket: Bucket) -> None:
        """Makes a leaf FULL at its first use. Skips buckets FULL at the start: they may have been freed since."""
        leaf = self._leaf_of.get(bucket.index)
        if leaf is None or leaf in self._demanded_leaves:
            return
        assert self._situation is not None
        self._demanded_leaves.add(leaf)
        _, _, gathered = self._situation
        for index in leaf:
            if index not in gathered:
                self.demand(self._buckets[index])

    def _issue_up_to(self, bucket: Bucket) -> None:
        if self._situation is None:
            self._agreement.collect(0, bucket.index, in_pass=False)
            bucket.start_gather()
            return
        self._decide_recording()
        position = len(self._issued)
        if self._order is not None:
            try:
                found = self._order.index(bucket.index, position)
            except ValueError:
                # Every rank must leave the order here with the same request, or all raise in the exchange below.
                if self._agreement.serves:
                    self._issue_rest()
                else:
                    self._is_learned = True
                self._order = None
            else:
                for index in self._order[position : found + 1]:
                    self._issue(self._buckets[index])
                return
        self._serve(bucket.index)

    def _decide_recording(self) -> None:
        """Decides, before the first gather or the end of a pass, whether it is recorded."""
        if self._has_decided:
            return
        assert self._situation is not None
        self._has_decided = True
        self._is_learned = self._order is None
        if self._agreement.serves:
            kind, entry, full = self._situation
            known = (kind, entry, sorted(full), sorted(self._left_out), self._order)
            knowledge = zlib.crc32(repr(known).encode())
            while (found := self._agreement.compare(knowledge)) is PassMode.HELP:
                self._help()
            if found is PassMode.RECORD:
                self._order, self._is_learned = None, False

    def _help(self) -> None:
        """Takes part in an evaluation of ranks that run more of them, before the open pass gathers anything."""
        while self._serve(END_OF_PASS):
            continue
        self._agreement.end_help(self._issued)
        self._issued = []
        for bucket in self._buckets.values():
            if bucket.state is State.GATHERING:
                bucket.abandon_gather()

    def _issue_rest(self) -> None:
        """Issues the rest of the order; a rank that has left the order keeps no more of it than fits."""
        assert self._order is not None
        for index in self._order[len(self._issued) :]:
            self._issue_for_others(index)

    def _issue_for_others(self, index: int) -> None:
        bucket = self._buckets[index]
        self._issue(bucket)
        if self._agreement.serves and bucket.state is State.GATHERING and self._count.live > self._max_live:
            bucket.abandon_gather()

    def _serve(self, request: int) -> bool:
        """Gathers what all ranks want now; returns whether any does. All ranks must come here.

        Args:
            request: Index of the bucket that this rank wants, or ``END_OF_PASS``.
        """
        wanted = self._agreement.collect(len(self._issued), request)
        for index in wanted:
            if index == request:
                self._issue(self._buckets[index])
            else:
                self._issue_for_others(index)
        return bool(wanted)

    def _issue(self, bucket: Bucket) -> None:
        self._issued.append(bucket.index)
        if bucket.state is State.GATHERING:  # skipped by this rank the last time; that transfer must end first
            bucket.finish_gather()
        if bucket.state is State.FULL:
            bucket.repeat_gather()
        else:
            bucket.start_gather()

    def _prefetch(self, demanded: Bucket) -> None:
        """Requests the next buckets of the order, to overlap with the computation of the demanded unit.

        The rest of that unit and all of the next one are requested, further units as long as the limit of prefetching
        allows it; nothing beyond the limit of live parameters.
        """
        order = self._order
        if order is None:
            return
        count, limits = self._count, self._limits
        unit = self._units[demanded.index]
        ahead = count.arriving_numel - sum(count.arriving.get(index, 0) for index in unit)
        following: tuple[int, ...] | None = None  # the next unit, if a part of it is in flight
        if ahead:
            following = self._units[next(index for index in count.arriving if index not in unit)]
        while len(self._issued) < len(order):
            upcoming = self._buckets[order[len(self._issued)]]
            if upcoming.state is not State.SHARDED:
                return
            numel, its_unit = upcoming.layout.numel, self._units[upcoming.index]
            is_near = its_unit in (unit, following) or following is None
            fits = limits.prefetch > 0 and (is_near or ahead + numel <= limits.prefetch)
            if not fits or count.live + numel > self._max_live:
                self._announce()
                return
            self._issue(upcoming)
            if its_unit != unit:
                ahead += numel
                following = following or its_unit


class GatherCount:
    """Counts the gathered elements of sharded buckets. A change costs the same for any number of buckets."""

    def __init__(self) -> None:
        self.live = 0  # elements of buckets that are gathered or in flight
        # elements of each bucket that is in flight, by the index of the bucket, oldest first
        self.arriving: OrderedDict[int, int] = OrderedDict()
        self.arriving_numel = 0  # their sum

    def change(self, index: int, numel: int, before: State, after: State) -> None:
        """Records that a bucket changes its state."""
        if before is State.GATHERING:
            self.arriving_numel -= self.arriving.pop(index)
        if after is State.GATHERING:
            self.arriving[index] = numel
            self.arriving_numel += numel
        self.live += numel * ((after is not State.SHARDED) - (before is not State.SHARDED))


def _joined(leaves: Iterable[Iterable[Bucket]]) -> dict[int, tuple[int, ...]]:
    """Returns by bucket the buckets gathered with it, in model order; leaves that share a bucket count as one leaf."""
    found: list[set[int]] = []
    for leaf in leaves:
        joined = {bucket.index for bucket in leaf}
        for other in [other for other in found if other & joined]:
            joined |= other
            found.remove(other)
        found.append(joined)
    return {index: tuple(sorted(joined)) for joined in found if len(joined) > 1 for index in joined}


class LearnedOrder:
    """Merges recorded passes of one situation into the order of its gathers.

    A pass that leaves buckets out shows a part of the order; several such passes are merged. If they do not determine
    which of two buckets comes first, the bucket numbers do. If that is wrong, a gather is only early: a rank skips
    what it does not need now.
    """

    def __init__(self) -> None:
        # numbers of buckets, in the order of their gathers; a bucket may come more than once
        self.order: list[int] = []
        self._unseen: frozenset[int] | None = None  # buckets left out by every pass so far; None before the first pass

    def without(self, skipped: AbstractSet[int]) -> list[int] | None:
        """Returns the order of a pass that leaves ``skipped`` out; None if it may need what no pass has shown yet."""
        if self._unseen is None or not self._unseen <= skipped:
            return None
        return [index for index in self.order if index not in skipped]

    def learn(self, order: Sequence[int], skipped: AbstractSet[int], *, falls: bool) -> None:
        """Merges a recorded pass.

        Args:
            falls: Whether bucket numbers fall along the order, as in a backward.
        """
        known, merged = self.order, list(order)
        for position, index in enumerate(known):
            if index in skipped and index not in merged:
                merged.insert(_place(index, known[:position], known, merged, falls=falls), index)
        self.order = merged
        self._unseen = frozenset(skipped) if self._unseen is None else self._unseen & skipped


def _place(index: int, before: Sequence[int], known: Sequence[int], merged: Sequence[int], *, falls: bool) -> int:
    """Returns the place of ``index``: after the last of those it followed, and after new ones with a lower number."""
    place = max((merged.index(other) + 1 for other in before if other in merged), default=0)
    while place < len(merged) and merged[place] not in known and (merged[place] > index) == falls:
        place += 1
    return place
