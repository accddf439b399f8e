"""When sharded buckets are gathered (``zero.gather.schedule``), on ranks that are threads."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from deepspeed.errors import DivergenceError
from deepspeed.zero.address import State
from deepspeed.zero.gather import schedule
from deepspeed.zero.gather.agreement import Agreement
from deepspeed.zero.gather.schedule import GatherLimits, GatherSchedule
from deepspeed.zero.passes import UNKNOWN_ENTRY, ModelPhase, Pass, PassTracker
from deepspeed.zero.storage import Memory
from tests.harness import on_threads
from tests.harness.loopback import LoopbackTransport, run_threads
from tests.zero.alone import bucket_of

NUMEL = 128
AT_ONCE = GatherLimits(prefetch=0, max_live=10**6, max_reuse_distance=0)  # nothing ahead, nothing kept


class Gathering:
    """Sharded buckets of one parameter each under a schedule; every demand is checked and given back."""

    def __init__(
        self,
        transport: LoopbackTransport,
        limits: GatherLimits = AT_ONCE,
        *,
        count: int = 4,
        leaves: Sequence[Sequence[int]] = (),
        units: Sequence[Sequence[int]] = (),
        serves: bool = False,
        adapts: bool = False,
    ) -> None:
        self.transport = transport
        self.buckets = [
            bucket_of(transport, [nn.Parameter(torch.full((NUMEL,), float(number)))], index=number)
            for number in range(count)
        ]
        self.passes = PassTracker()
        self.agreement = Agreement(transport, [f"bucket {number}" for number in range(9)], serves=serves, adapts=adapts)
        self.schedule = GatherSchedule(
            self.buckets,
            self.passes,
            self.agreement,
            limits,
            [[self.buckets[n] for n in leaf] for leaf in leaves],
            units,
        )

    def run(self, *numbers: int, kind: str = "forward", entry: int = 0) -> list[str]:
        """A pass that uses these buckets; how the others were when each was used: S, G or F."""
        self.begin(kind, entry)
        seen = [self.use(number) for number in numbers]
        self.end()
        return seen

    def begin(self, kind: str, entry: int = UNKNOWN_ENTRY) -> Pass:
        now = self.passes.begin(ModelPhase(kind), entry)
        self.schedule.begin(now, self.buckets)
        return now

    def end(self) -> None:
        assert self.passes.current is not None
        self.schedule.end(self.passes.current)
        self.passes.end()

    def use(self, number: int) -> str:
        bucket = self.buckets[number]
        self.schedule.demand(bucket)
        assert bucket.state is State.FULL and bool((bucket.params[0] == number).all())
        states = self.states
        if not bucket.is_kept:
            bucket.reshard()
        return states

    def free(self) -> None:
        for bucket in self.buckets:
            if bucket.state is State.FULL:
                bucket.reshard()

    @property
    def states(self) -> str:
        return "".join(bucket.state.value[0].upper() for bucket in self.buckets)

    def calls(self, operation: str) -> int:
        """How many of them this rank has made."""
        return sum(name == operation for name, _ in self.transport.network.log[self.transport.rank])


def test_a_recorded_order_is_agreed_once_and_then_followed() -> None:
    def body(transport: LoopbackTransport) -> int:
        ranks = Gathering(transport)
        assert not ranks.schedule.has_orders
        ranks.run(0, 2, 1, 3)
        assert ranks.calls("gather_small") == 5  # a wish for each, and the end
        assert ranks.schedule.has_orders
        for _ in range(3):
            ranks.run(0, 2, 1, 3)
        assert ranks.calls("gather_small") == 5 and ranks.calls("all_gather") == 16
        ranks.schedule.forget_orders()
        ranks.run(0, 2, 1, 3)
        assert ranks.calls("gather_small") == 10
        return ranks.agreement.digest

    first, second = run_threads(body, 2)
    assert first == second != 0


@on_threads(2)
def test_kinds_and_entries_have_orders_of_their_own(transport: LoopbackTransport) -> None:
    ranks = Gathering(transport)
    ranks.run(0, 1)
    ranks.run(1, 0, kind="backward")
    ranks.run(2, entry=1)
    recorded = ranks.calls("gather_small")
    assert recorded == 3 + 3 + 2
    for _ in range(2):
        ranks.run(0, 1)
        ranks.run(1, 0, kind="backward")
        ranks.run(2, entry=1)
    assert ranks.calls("gather_small") == recorded


@on_threads(2)
def test_a_backward_learns_its_entry_before_its_first_gather(transport: LoopbackTransport) -> None:
    ranks = Gathering(transport)
    for _ in range(2):
        for entry, numbers in ((3, (0, 1)), (4, (2,))):
            now = ranks.begin("backward")
            ranks.schedule.enter(now, entry)
            ranks.use(numbers[0])
            ranks.schedule.enter(now, 9)  # too late to be its entry
            for number in numbers[1:]:
                ranks.use(number)
            ranks.end()
    assert ranks.calls("gather_small") == 3 + 2
    for _ in range(2):
        now = ranks.begin("backward")
        ranks.use(0)
        ranks.schedule.enter(now, 5)  # it stays one without an entry
        ranks.end()
    assert ranks.calls("gather_small") == 3 + 2 + 2


def test_a_rank_that_skips_a_bucket_still_sends_its_slice() -> None:
    def body(transport: LoopbackTransport) -> str:
        ranks = Gathering(transport)
        ranks.run(0, 1, 2, 3)
        ranks.run(*((0, 1, 2, 3) if transport.rank == 0 else (0, 3)))
        ranks.run(*((0, 1) if transport.rank == 0 else (0, 1, 2, 3)))
        assert ranks.calls("gather_small") == 5 and ranks.calls("all_gather") == 12
        ranks.free()
        return ranks.states

    assert run_threads(body, 2) == ["SSSS", "SSSS"]


def test_ranks_that_want_other_buckets_all_raise() -> None:
    def body(transport: LoopbackTransport) -> str:
        ranks = Gathering(transport)
        with pytest.raises(DivergenceError, match="rank 0: bucket 1; rank 1: bucket 2") as raised:
            ranks.run(0, 1 + transport.rank)
        assert ranks.passes.current is not None
        ranks.schedule.drop()
        ranks.passes.end()
        assert not ranks.schedule.has_orders
        with pytest.raises(DivergenceError, match="the end of the forward"):
            ranks.run(*((0, 1) if transport.rank else (0,)))
        return str(raised.value)

    assert len(set(run_threads(body, 2))) == 1


@on_threads(2)
def test_ranks_may_leave_the_order_together(transport: LoopbackTransport) -> None:
    ranks = Gathering(transport)
    ranks.run(0, 1, 2)
    before = ranks.calls("gather_small")
    ranks.run(0, 3, 1)  # 3 is not in what is left of the order
    assert ranks.calls("gather_small") == before + 3  # 3, 1 and the end
    ranks.run(0, 3, 1)
    assert ranks.calls("gather_small") == before + 3


# -- agreement: serve ------------------------------------------------------------------------------------------------

AHEAD = GatherLimits(prefetch=2 * NUMEL, max_live=10**6, max_reuse_distance=0)
TIGHT = GatherLimits(prefetch=NUMEL, max_live=2 * NUMEL, max_reuse_distance=0)


@pytest.mark.parametrize("limits", [AT_ONCE, AHEAD, TIGHT], ids=["at once", "ahead", "tight"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_branches_of_any_ranks_are_served(size: int, limits: GatherLimits) -> None:
    """At random: which buckets, how often, in which order, by which entry; the checks are in ``Gathering.use``."""

    def body(transport: LoopbackTransport) -> int:
        ranks = Gathering(transport, limits, count=6, serves=True)
        for step in range(12):
            own = random.Random(100 * step + (transport.rank if step % 3 else 0))
            numbers = [own.randrange(6) for _ in range(own.randrange(7))]
            ranks.run(*numbers, entry=own.randrange(2) if step % 4 == 3 else 0)
            ranks.run(*reversed(numbers), kind="backward")
        ranks.free()
        assert ranks.states == "SSSSSS"
        return ranks.agreement.digest

    assert len(set(run_threads(body, size))) == 1


def test_a_gather_requested_by_one_rank_costs_one_exchange() -> None:
    def body(transport: LoopbackTransport) -> list[str]:
        ranks = Gathering(transport, AHEAD, serves=True)
        ranks.run(0, 1, 3)
        recorded = ranks.calls("gather_small")
        ranks.run(0, 1, 3)
        followed = ranks.calls("gather_small") - recorded
        assert followed == 2, "the start and the end"
        seen = ranks.run(0, 2, 3) if transport.rank == 0 else ranks.run(0, 1, 3)
        assert ranks.calls("gather_small") == recorded + followed + 3
        ranks.run(0, 1, 3)  # what one rank wanted once is not gathered by all for ever
        assert ranks.calls("gather_small") == recorded + 2 * followed + 3
        assert ranks.calls("all_gather") == 3 + 3 + 4 + 3
        return seen

    first, second = run_threads(body, 2)
    assert second[0] == "FGSG"  # prefetched, as without serving
    assert first[2][3] == "F" and first[1][2] == "F"


def test_without_serving_nothing_is_exchanged_on_its_account() -> None:
    def body(transport: LoopbackTransport) -> int:
        ranks = Gathering(transport)
        ranks.run(0, 1, 3)
        recorded = ranks.calls("gather_small")
        ranks.run(0, 1, 3)
        return ranks.calls("gather_small") - recorded

    assert run_threads(body, 2) == [0, 0]


@on_threads(2)
def test_passes_that_differ_are_an_error_on_every_rank(transport: LoopbackTransport) -> None:
    ranks = Gathering(transport, serves=True)
    with pytest.raises(DivergenceError, match="ranks ran different passes"):
        ranks.run(0, kind="backward" if transport.rank else "forward")


def test_more_evaluations_on_one_rank_are_served() -> None:
    """The others help before their next pass, whatever it is; records and later passes stay as they were."""

    def body(transport: LoopbackTransport) -> int:
        ranks = Gathering(transport, AHEAD, serves=True)
        for step in range(4):
            for _ in range(1 + (2 * transport.rank + step) % 4):
                ranks.run(0, 1, 2, kind="evaluation")
            ranks.run(0, 1, 3)
            if step == 2 and transport.rank == 1:
                ranks.run(3, kind="evaluation")  # between a forward and its backward
            ranks.run(3, 1, kind="backward")
        before = ranks.calls("gather_small")
        assert ranks.run(0, 1, 3)[0][1] == "G"  # known, as without those evaluations
        assert ranks.calls("gather_small") == before + 2
        ranks.free()
        assert ranks.states == "SSSS"
        return ranks.agreement.digest

    for size in (2, 3):
        assert len(set(run_threads(body, size))) == 1


# -- agreement: adapt ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [AT_ONCE, AHEAD, TIGHT], ids=["at once", "ahead", "tight"])
def test_ranks_that_differ_while_recording_are_served_from_then_on(limits: GatherLimits) -> None:
    def body(transport: LoopbackTransport) -> int:
        ranks = Gathering(transport, limits, adapts=True)
        ranks.run(0, 1)
        ranks.run(0, 1)
        assert not ranks.agreement.serves and ranks.calls("gather_small") == 4, "1 at the end, since 2 and 3 are unused"
        ranks.run(*((1, 3, 0) if transport.rank == 0 else (1, 0)), kind="backward")
        assert ranks.agreement.serves
        ranks.run(*((0, 2, 1) if transport.rank else (0, 1)))
        ranks.run(*((2, 0) if transport.rank else (3, 1)), kind="backward")
        ranks.free()
        return ranks.agreement.digest

    assert len(set(run_threads(body, 2))) == 1


@on_threads(2)
def test_what_a_rank_needed_while_the_order_was_recorded_costs_no_gather_by_request(
    transport: LoopbackTransport,
) -> None:
    ranks = Gathering(transport, AHEAD, adapts=True)
    mine = (0, 1, 2) if transport.rank == 0 else (0, 2)
    ranks.run(*mine)
    before = ranks.calls("gather_small")
    ranks.run(*mine)
    assert ranks.calls("gather_small") == before + 2, "the start and the end"


@on_threads(2)
def test_the_next_unit_is_gathered_ahead(transport: LoopbackTransport) -> None:
    ranks = Gathering(transport, GatherLimits(prefetch=1, max_live=10**6, max_reuse_distance=0))
    assert ranks.run(0, 1, 2, 3) == ["FSSS", "SFSS", "SSFS", "SSSF"]  # nothing is known yet
    assert ranks.run(0, 1, 2, 3) == ["FGSS", "SFGS", "SSFG", "SSSF"]
    far = Gathering(transport, GatherLimits(prefetch=2 * NUMEL, max_live=10**6, max_reuse_distance=0))
    far.run(0, 1, 2, 3)
    assert far.run(0, 1, 2, 3) == ["FGGS", "SFGG", "SSFG", "SSSF"]
    unit = Gathering(transport, GatherLimits(prefetch=1, max_live=10**6, max_reuse_distance=0), units=[[0, 1], [2, 3]])
    unit.run(0, 1, 2, 3)
    assert unit.run(0, 1, 2, 3) == ["FGGG", "SFGG", "SSFG", "SSSF"]
    never = Gathering(transport)
    never.run(0, 1, 2, 3)
    assert never.run(0, 1, 2, 3) == ["FSSS", "SFSS", "SSFS", "SSSF"]


@on_threads(2)
def test_nothing_is_gathered_beyond_the_limit_of_live_elements(transport: LoopbackTransport) -> None:
    ranks = Gathering(transport, GatherLimits(prefetch=10**6, max_live=2 * NUMEL, max_reuse_distance=0))
    ranks.run(0, 1, 2, 3)
    assert ranks.run(0, 1, 2, 3) == ["FGSS", "SFGS", "SSFG", "SSSF"]


def test_a_unit_that_is_still_gathered_starts_the_next_one_too() -> None:
    def body(transport: LoopbackTransport, serves: bool) -> None:
        limits = GatherLimits(prefetch=1, max_live=10**6, max_reuse_distance=0)
        ranks = Gathering(transport, limits, serves=serves)
        for _ in range(3):
            ranks.begin("forward", 0)
            for number in range(4):
                ranks.schedule.demand(ranks.buckets[number])
                if not ranks.schedule.stays_after_forward(ranks.buckets[number]):
                    ranks.buckets[number].reshard()
            ranks.end()
            assert ranks.states == "SSSF"
            seen = ranks.run(3, 2, 1, 0, kind="backward")
        # Ranks that may want different buckets compare what they know before they gather anything.
        assert seen == ["SSSF" if serves else "SSGF", "SGFS", "GFSS", "FSSS"]

    for serves in (False, True):
        run_threads(body, 2, serves)


def test_two_neighboring_units_have_room_where_nothing_is_configured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(schedule, "_LEAST_LIVE", NUMEL)
    monkeypatch.setattr("deepspeed.logging._seen", set())
    units = [[0, 1], [2, 3]]

    def body(transport: LoopbackTransport, max_live: int | None) -> list[str]:
        ranks = Gathering(transport, GatherLimits(prefetch=1, max_live=max_live, max_reuse_distance=0), units=units)
        ranks.run(0, 1, 2, 3)
        return ranks.run(0, 1, 2, 3)

    assert run_threads(body, 1, None) == [["FGGG", "SFGG", "SSFG", "SSSF"]]
    assert "stage3_max_live_parameters" not in caplog.text
    assert run_threads(body, 1, 3 * NUMEL) == [["FGGS", "SFGG", "SSFG", "SSSF"]]
    assert f"stage3_max_live_parameters={3 * NUMEL}: the largest two neighboring modules" in caplog.text


class _ReadAhead(Memory):
    """Notes which shards are to be read soon, as a slow tier is told."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.announced: list[int] = []

    def announce(self, tensor: torch.Tensor) -> None:
        self.announced.append(int(tensor[0]))


@on_threads(2)
def test_shards_beyond_what_may_be_gathered_ahead_are_read_ahead(transport: LoopbackTransport) -> None:
    ranks = Gathering(transport, GatherLimits(prefetch=1, max_live=10**6, max_reuse_distance=0), count=6)
    memory = _ReadAhead()
    for bucket in ranks.buckets:
        bucket.memory = memory
    ranks.run(*range(6))
    assert memory.announced == [], "no order is known yet"
    ranks.begin("forward", 0)
    for number, expected in enumerate([[2, 3], [3, 4], [4, 5], [5], [], []]):
        ranks.use(number)
        assert memory.announced == expected, f"bucket {number} is used, and the next one gathered"
        memory.announced.clear()
    ranks.end()


@on_threads(2)
def test_what_was_gathered_in_vain_is_freed_and_what_is_kept_stays(transport: LoopbackTransport) -> None:
    ranks = Gathering(transport, GatherLimits(prefetch=10**6, max_live=10**6, max_reuse_distance=2 * NUMEL))
    kept = [ranks.schedule.stays_after_forward(bucket) for bucket in ranks.buckets]
    assert kept == [False, False, True, True]  # nothing and one bucket between their forward and backward
    ranks.run(0, 1, 2, 3)
    ranks.run(*((0, 1, 2, 3) if transport.rank == 0 else (0,)))
    if transport.rank == 1:
        assert ranks.states == "SSFF"  # 1 was abandoned; the rest is gathered as on the other rank
    ranks.free()
    ranks.run(0, 1, 2, 3, kind="evaluation")
    ranks.run(*((0, 1, 2, 3) if transport.rank == 0 else (0,)), kind="evaluation")
    assert ranks.states == "SSSS"


@pytest.mark.parametrize(("distance", "live", "kept"), [(0, 9, 1), (2, 9, 2), (4, 9, 3), (9, 2, 2), (9, 0, 0)])
def test_how_many_buckets_stay_after_forward(distance: int, live: int, kept: int) -> None:
    def body(transport: LoopbackTransport) -> list[bool]:
        limits = GatherLimits(prefetch=0, max_live=live * NUMEL, max_reuse_distance=distance * NUMEL)
        ranks = Gathering(transport, limits)
        return [ranks.schedule.stays_after_forward(bucket) for bucket in ranks.buckets]

    assert run_threads(body, 1)[0] == [number >= 4 - kept for number in range(4)]


@on_threads(2)
def test_any_part_of_a_leaf_gathers_all_of_it_in_a_backward(transport: LoopbackTransport) -> None:
    ranks = Gathering(transport, leaves=[[1, 2]])
    for _ in range(2):
        ranks.begin("backward")
        ranks.schedule.demand(ranks.buckets[1 + transport.rank])  # another part of it on each rank
        assert ranks.states == "SFFS"
        ranks.free()
        ranks.end()
    ranks.begin("forward", 0)
    ranks.schedule.demand(ranks.buckets[1])
    assert ranks.states == "SFSS"
    ranks.free()
    ranks.end()


@on_threads(2)
def test_announced_buckets_are_left_out_of_a_known_order(transport: LoopbackTransport) -> None:
    ranks = Gathering(transport)
    ranks.run(0, 1, 2, 3)
    ranks.schedule.skip(frozenset({1, 2}))
    before = ranks.calls("all_gather")
    ranks.run(0, 3)
    assert ranks.calls("gather_small") == 5 and ranks.calls("all_gather") == before + 2
    ranks.schedule.skip(frozenset())
    ranks.run(0, 1, 2, 3)
    assert ranks.calls("gather_small") == 5


@on_threads(2)
def test_expects_no_gather_once_the_order_is_done(transport: LoopbackTransport) -> None:
    ranks = Gathering(transport)
    ranks.run(0, 1)
    assert ranks.passes.expects_no_gather
    now = ranks.begin("forward", 0)
    assert not ranks.passes.expects_no_gather
    ranks.use(0)
    assert not ranks.passes.expects_no_gather and now.issued == [0]
    ranks.use(1)
    assert ranks.passes.expects_no_gather and ranks.passes.phase is ModelPhase.FORWARD
    ranks.end()


def test_a_rank_that_runs_a_pass_more_has_another_digest() -> None:
    def body(transport: LoopbackTransport) -> int:
        ranks = Gathering(transport, count=0)
        ranks.run()
        if transport.rank:
            ranks.run(kind="evaluation")
        return ranks.agreement.digest

    first, second = run_threads(body, 2)
    assert first != second
