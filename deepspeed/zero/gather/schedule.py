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
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from deepspeed.logging import warn_once
from deepspeed.uncompiled import uncompiled
from deepspeed.zero.bucket import Bucket, State
from deepspeed.zero.gather.agreement import END_OF_PASS, Agreement, PassMode
from deepspeed.zero.passes import UNKNOWN_ENTRY, ModelPhase, Pass, PassTracker


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

Situation = tuple[ModelPhase, int, frozenset[int]]
"""What an order is valid for: phase, entry and gathered buckets of a pass, equal on all ranks."""


class GatherSchedule:
    """Makes buckets FULL on demand, in one order on all ranks.

    Args:
        units: For each unit, the indices of its buckets, sharded or not; a bucket in none is a unit by itself.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        passes: PassTracker,
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
        self._passes = passes
        self._agreement = agreement
        self._limits = limits
        self._memories = list({id(bucket.memory): bucket.memory for bucket in buckets}.values())
        self._max_live = self._limit_of_live(limits)
        self._orders: dict[Situation, LearnedOrder] = {}
        self._skipped: frozenset[int] = frozenset()
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

    def begin(self, now: Pass, below: Collection[Bucket] = ()) -> None:
        """Prepares the gathers of a pass that begins. All ranks must begin the same one.

        Args:
            now: The pass.
            below: The sharded buckets with parameters of the module whose forward it is.
        """
        now.serves = self._agreement.serves
        if not self._buckets:
            now.order = []
            self._agreement.begin_pass(now.phase)
            return
        now.gathered = frozenset(self.full)
        if now.phase is ModelPhase.BACKWARD:
            now.gathered |= self._skipped & self._kept_after_forward
        now.order = self._known_order(now)
        now.serves = now.serves or (self._agreement.adapts and self._leaves_parameters_out(now, below))
        # While everything is kept gathered, a pass gathers nothing, so ranks may differ (a rank that generates may
        # stop earlier than others).
        now.is_alone = now.phase is ModelPhase.EVALUATION and all(bucket.pins for bucket in self._buckets.values())
        if not now.is_alone:
            self._agreement.begin_pass(now.phase)
        self._show_shapes(True)

    def enter(self, now: Pass, entry: int) -> None:
        """Called when the open backward reaches the outputs of a forward.

        The first one before any gather is its entry.
        """
        if now.entry == UNKNOWN_ENTRY and not now.issued and not now.has_decided:
            now.entry = entry
            now.order = self._known_order(now)

    def _known_order(self, now: Pass) -> list[int] | None:
        learned = self._orders.get((now.phase, now.entry, now.gathered))
        return None if learned is None else learned.without(self._left_out(now))

    def _leaves_parameters_out(self, now: Pass, below: Collection[Bucket]) -> bool:
        """Returns whether a forward follows an order that some ranks may leave for parameters that none has used."""
        if now.order is None or now.phase is ModelPhase.BACKWARD:  # a backward uses what its forward has used
            return False
        used = now.gathered.union(now.order, self._left_out(now))
        return any(bucket.index not in used for bucket in below)

    def _left_out(self, now: Pass) -> frozenset[int]:
        """Returns the buckets that a pass skips; none in an evaluation."""
        return frozenset() if now.phase is ModelPhase.EVALUATION else self._skipped

    def end(self, now: Pass) -> None:
        """Ends the gathers of a pass: takes part in skipped ones, and agrees on the order if it was recorded."""
        if not self._buckets:
            self._agreement.end_pass(())
            return
        if now.is_alone:
            self._show_shapes(False)
            return
        self._decide_recording(now)
        if now.order is not None:
            self._issue_rest(now)
        while (now.order is None or now.serves) and self._serve(now, END_OF_PASS):
            continue
        if now.is_learned:
            learned = self._orders.setdefault((now.phase, now.entry, now.gathered), LearnedOrder())
            learned.learn(now.issued, self._left_out(now), falls=now.phase is ModelPhase.BACKWARD)
        self._agreement.end_pass(now.issued)
        now.order, now.serves = now.issued, False  # a backward goes on with its reductions, and nothing is gathered
        self._forget_announced()
        self._show_shapes(False)
        for index in list(self._count.arriving):
            if now.phase is ModelPhase.FORWARD and index in self._kept_after_forward:
                # this rank skipped it, but all ranks must have gathered the same
                self._buckets[index].finish_gather()
            else:
                self._buckets[index].abandon_gather()

    def drop(self) -> None:
        """Ends the transfers of a pass after an exception; its order is not learned."""
        self._forget_announced()
        self._show_shapes(False)
        self._abandon_gathers()

    def _abandon_gathers(self) -> None:
        for index in list(self._count.arriving):
            self._buckets[index].abandon_gather()

    @property
    def full(self) -> list[int]:
        """The sharded buckets that are gathered now, by their indices, in model order."""
        return sorted(self._count.gathered - self._count.arriving.keys())

    def _show_shapes(self, shown: bool) -> None:
        for bucket in self._buckets.values():
            bucket.show_shapes(shown)

    def _announce(self, now: Pass) -> None:
        """Starts to read shards from a slow tier, one gather ahead."""
        assert now.order is not None
        for index in now.order[len(now.issued) : len(now.issued) + _ANNOUNCED]:
            self._buckets[index].announce()

    def _forget_announced(self) -> None:
        for memory in self._memories:
            memory.forget()

    # -- gathers -----------------------------------------------------------------------------------------------------

    @uncompiled
    def demand(self, bucket: Bucket) -> None:
        """Makes ``bucket`` FULL and prefetches the next ones of the order."""
        now = self._passes.current
        if now is None:
            if bucket.state is State.SHARDED:
                self._agreement.collect(0, bucket.index, in_pass=False)
                bucket.start_gather()
            if bucket.state is State.GATHERING:
                bucket.finish_gather()
            return
        if self._leaf_of and now.phase is ModelPhase.BACKWARD:
            self._demand_leaf_of(bucket, now)
        if bucket.state is State.SHARDED:
            self._issue_up_to(bucket, now)
        if bucket.state is State.GATHERING:
            self._prefetch(bucket, now)
            bucket.finish_gather()
        elif now.order is not None:
            # Already FULL (kept since its forward, or pinned): prefetch as after a gather.
            if not self._agreement.serves:
                self._decide_recording(now)  # makes no exchange
            if now.has_decided:
                self._prefetch(bucket, now)

    def _demand_leaf_of(self, bucket: Bucket, now: Pass) -> None:
        """Makes a leaf FULL at its first use. Skips buckets FULL at the start: they may have been freed since."""
        leaf = self._leaf_of.get(bucket.index)
        if leaf is None or leaf in now.used_leaves:
            return
        now.used_leaves.add(leaf)
        for index in leaf:
            if index not in now.gathered:
                self.demand(self._buckets[index])

    def _issue_up_to(self, bucket: Bucket, now: Pass) -> None:
        self._decide_recording(now)
        position = len(now.issued)
        if now.order is not None:
            try:
                last = now.order.index(bucket.index, position)
            except ValueError:
                # Every rank must leave the order here with the same request, or all raise in the exchange below.
                others_may_follow = now.serves
                if others_may_follow:
                    self._issue_rest(now)
                now.order = None
                self._serve(now, bucket.index)
                now.is_learned |= not (others_may_follow and self._agreement.serves)
                return
            else:
                for index in now.order[position : last + 1]:
                    self._issue(self._buckets[index], now)
                return
        self._serve(now, bucket.index)

    def _decide_recording(self, now: Pass) -> None:
        """Decides, before the first gather or the end of a pass, whether it is recorded."""
        if now.has_decided:
            return
        now.has_decided = True
        now.is_learned = now.order is None
        if self._agreement.serves:
            known = (now.phase.value, now.entry, sorted(now.gathered), sorted(self._left_out(now)), now.order)
            knowledge = zlib.crc32(repr(known).encode())
            while (mode := self._agreement.compare(knowledge)) is PassMode.HELP:
                # takes part in an evaluation of ranks that run more of them, before this pass gathers anything
                while self._serve(now, END_OF_PASS):
                    continue
                self._agreement.end_help(now.issued)
                now.issued.clear()
                self._abandon_gathers()
            if mode is PassMode.RECORD:
                now.order, now.is_learned = None, False

    def _issue_rest(self, now: Pass) -> None:
        """Issues the rest of the order; a rank that has left the order keeps no more of it than fits."""
        assert now.order is not None
        for index in now.order[len(now.issued) :]:
            self._issue_for_others(index, now)

    def _issue_for_others(self, index: int, now: Pass) -> None:
        bucket = self._buckets[index]
        self._issue(bucket, now)
        if now.serves and bucket.state is State.GATHERING and self._count.live > self._max_live:
            bucket.abandon_gather()

    def _serve(self, now: Pass, request: int) -> bool:
        """Gathers what all ranks want now; returns whether any does. All ranks must come here."""
        wanted = self._agreement.collect(len(now.issued), request)
        now.serves |= self._agreement.serves
        for index in wanted:
            if index == request:
                self._issue(self._buckets[index], now)
            else:
                self._issue_for_others(index, now)
        return bool(wanted)

    def _issue(self, bucket: Bucket, now: Pass) -> None:
        now.issued.append(bucket.index)
        if bucket.state is State.GATHERING:  # skipped by this rank the last time; that transfer must end first
            bucket.finish_gather()
        if bucket.state is State.FULL:
            bucket.repeat_gather()
        else:
            bucket.start_gather()

    def _prefetch(self, demanded: Bucket, now: Pass) -> None:
        """Requests the next buckets of the order, to overlap with the computation of the demanded unit.

        The rest of that unit and all of the next one are requested, further units as long as the limit of prefetching
        allows it; nothing beyond the limit of live parameters.
        """
        order = now.order
        if order is None:
            return
        count, limits = self._count, self._limits
        unit = self._units[demanded.index]
        ahead = count.arriving_numel - sum(count.arriving.get(index, 0) for index in unit)
        following: tuple[int, ...] | None = None  # the next unit, if a part of it is in flight
        if ahead:
            following = self._units[next(index for index in count.arriving if index not in unit)]
        while len(now.issued) < len(order):
            upcoming = self._buckets[order[len(now.issued)]]
            if upcoming.state is not State.SHARDED:
                return
            numel, its_unit = upcoming.layout.numel, self._units[upcoming.index]
            is_near = its_unit in (unit, following) or following is None
            fits = limits.prefetch > 0 and (is_near or ahead + numel <= limits.prefetch)
            if not fits or count.live + numel > self._max_live:
                self._announce(now)
                return
            self._issue(upcoming, now)
            if its_unit != unit:
                ahead += numel
                following = following or its_unit


class GatherCount:
    """Counts the gathered elements of sharded buckets. A change costs the same for any number of buckets."""

    def __init__(self) -> None:
        self.gathered: set[int] = set()  # indices of buckets that are gathered or in flight
        self.live = 0  # their elements
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
        if after is State.SHARDED:
            self.gathered.discard(index)
        else:
            self.gathered.add(index)
        self.live += numel * ((after is not State.SHARDED) - (before is not State.SHARDED))


def _joined(leaves: Iterable[Iterable[Bucket]]) -> dict[int, tuple[int, ...]]:
    """Returns by bucket the buckets gathered with it, in model order; leaves that share a bucket count as one leaf."""
    groups: list[set[int]] = []
    for leaf in leaves:
        joined = {bucket.index for bucket in leaf}
        for other in [other for other in groups if other & joined]:
            joined |= other
            groups.remove(other)
        groups.append(joined)
    return {index: tuple(sorted(joined)) for joined in groups if len(joined) > 1 for index in joined}


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
        """Merges a recorded pass."""
        known, merged = self.order, list(order)
        for position, index in enumerate(known):
            if index in skipped and index not in merged:
                merged.insert(_place(index, known[:position], known, merged, falls=falls), index)
        self.order = merged
        self._unseen = frozenset(skipped) if self._unseen is None else self._unseen & skipped


def _place(index: int, before: Sequence[int], known: Sequence[int], merged: Sequence[int], *, falls: bool) -> int:
    """Returns the place of ``index``: after the last of those it followed, and after new ones with a lower number."""
    position = max((merged.index(other) + 1 for other in before if other in merged), default=0)
    while position < len(merged) and merged[position] not in known and (merged[position] > index) == falls:
        position += 1
    return position
