"""Which gradients are reduced when (``zero.gradient.gradients``), on ranks that are threads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.comm.transports.transport import Transport
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.gradient.gradient_sum import GradientDestination
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.passes import ModelPhase, PassTracker
from deepspeed.zero.storage import MemoryTracker
from tests.harness import on_threads
from tests.harness.loopback import LoopbackTransport, run_threads
from tests.zero.alone import bucket_of, policy_of

SIZES = (200, 330, 140)  # more than a block of 64 on each of two ranks


class NotingPasses(PassTracker):
    """Notes the buckets whose gradients have left the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[int] = []

    def note_gradients(self, bucket: Bucket) -> None:
        self.packed.append(bucket.index)


class Reducing:
    """A reducer over resident buckets of one parameter each, and what it was told of."""

    def __init__(
        self,
        transport: Transport,
        *,
        stage: int = 0,
        needs_one_order: bool = False,
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        self.transport = transport
        self.params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES]
        memory_tracker = MemoryTracker()
        buckets = [
            bucket_of(transport, [parameter], is_sharded=False, memory_tracker=memory_tracker, index=number)
            for number, parameter in enumerate(self.params)
        ]
        self.passes = NotingPasses()
        self.packed = self.passes.packed
        self.strays = 0
        self.may_block = True
        self.reducer = GradientReducer(
            buckets,
            policy_of(stage, **settings),
            transport,
            memory_tracker,
            [GradientDestination() for _ in buckets],
            passes=self.passes,
            agreement=SimpleNamespace(serves=False),  # type: ignore[arg-type]
            layers=SimpleNamespace(may_communicate=lambda: not self.may_block),  # type: ignore[arg-type]
            needs_one_order=needs_one_order,
        )

        self.passes.attach(self._stray)

    def _stray(self) -> None:
        self.strays += 1
        self.begin()

    def begin(self, *, reduces: bool = True, last: bool = True) -> None:
        everything = range(len(SIZES))
        now = self.passes.begin(ModelPhase.BACKWARD)
        now.order = []  # nothing is gathered
        self.reducer.begin(
            now,
            reaches=everything,
            reduces=frozenset(everything if reduces else ()),
            closes=frozenset(everything if last else ()),
        )

    def end(self) -> None:
        assert self.passes.current is not None
        self.reducer.end(self.passes.current)
        self.passes.end()

    def drop(self, *, with_sums: bool) -> None:
        assert self.passes.current is not None
        self.reducer.drop(self.passes.current, with_sums=with_sums)
        self.passes.end()

    @property
    def num_sent(self) -> int:
        """Of the open backward."""
        return self.passes.reductions.cursor if self.passes.reductions is not None else 0

    def arrive(self, *numbers: int, value: float = 1.0) -> None:
        """Gradients of some parameters arrive, in this order: the value times the number from 1, plus the rank."""
        for number in numbers:
            parameter = self.params[number]
            (parameter * (value * (number + 1) + self.transport.rank)).sum().backward()

    def backward(self, *numbers: int, value: float = 1.0, reduces: bool = True, last: bool = True) -> None:
        self.begin(reduces=reduces, last=last)
        self.arrive(*numbers, value=value)
        self.end()

    def results(self) -> list[float | None]:
        """What the update reads of each parameter, which is one number everywhere; None: nothing."""
        found: list[float | None] = []
        for gradients, size in zip(self.reducer.buckets, SIZES, strict=True):
            result = gradients.result
            if result is None:
                found.append(None)
                continue
            lower = self.transport.rank * result.numel() if self.reducer.policy.to_owner else 0
            own = result[: max(0, min(size - lower, result.numel()))]
            assert bool((own == own[0]).all())
            assert not bool(result[own.numel() :].any()), "padding is zero"
            found.append(own[0].item())
        return found

    def reductions(self) -> list[str]:
        log = self.transport.network.log[self.transport.rank]  # type: ignore[attr-defined]
        return [label[-2:] for operation, label in log if operation != "gather_small"]


def mean(value: float) -> list[float]:
    """Over two ranks."""
    return [value * (number + 1) + 0.5 for number in range(len(SIZES))]


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_every_rank_reads_the_mean(transport: LoopbackTransport, stage: int) -> None:
    ranks = Reducing(transport, stage=stage)
    for step in (1.0, 3.0, 4.0):
        ranks.backward(2, 1, 0, value=step)
        assert ranks.results() == mean(step)
        assert all(parameter.grad is None for parameter in ranks.params)
        ranks.reducer.clear()
        assert ranks.results() == [None] * 3 and not ranks.reducer.has_sums


@pytest.mark.parametrize("stage", [1, 2])
@on_threads(2)
def test_micro_batches_are_added_up_on_the_rank_or_at_the_owner(transport: LoopbackTransport, stage: int) -> None:
    ranks = Reducing(transport, stage=stage)
    each = stage == 2
    for step in range(2):
        ranks.backward(2, 1, 0, value=1.0, reduces=each, last=False)
        ranks.reducer.end_micro_step()
        assert (ranks.results() == mean(1.0)) is each and ranks.reducer.has_sums
        ranks.backward(2, 1, 0, value=2.0)
        assert ranks.results() == [value + 0.5 for value in mean(3.0)]
        assert len(ranks.reductions()) == (step + 1) * len(SIZES) * (2 if each else 1)
        ranks.reducer.clear()


def sent_order(ranks: Reducing) -> list[int]:
    """Which buckets are sent from now on, in their order."""
    sent = []
    for gradients in ranks.reducer.buckets:
        original = gradients.start_reduction

        def noted(*, as_sum: bool, index: int = gradients.bucket.index, original: Any = original) -> None:
            sent.append(index)
            original(as_sum=as_sum)

        gradients.start_reduction = noted  # type: ignore[method-assign]
    return sent


def test_reductions_are_sent_in_the_order_in_which_rank_0_completed_the_first_backward() -> None:
    def body(transport: LoopbackTransport) -> list[int]:
        ranks = Reducing(transport)
        ranks.backward(*((1, 0, 2) if transport.rank == 0 else (2, 1, 0)))
        ranks.reducer.clear()
        sent = sent_order(ranks)
        ranks.begin()
        ranks.arrive(2)
        assert sent == []
        ranks.arrive(0)
        assert sent == []
        ranks.arrive(1)
        assert sent == [1, 0, 2] and ranks.packed[-3:] == [2, 0, 1]
        assert ranks.num_sent == 3 and ranks.reducer.is_reducing
        ranks.end()
        assert ranks.results() == mean(1.0) and ranks.num_sent == 0
        return sent

    assert run_threads(body, 2) == [[1, 0, 2]] * 2


@on_threads(2)
def test_without_overlap_everything_is_sent_at_the_end(transport: LoopbackTransport) -> None:
    ranks = Reducing(transport, overlap=False)
    ranks.backward(0, 1, 2)
    ranks.reducer.clear()
    before = len(ranks.reductions())
    ranks.begin()
    ranks.arrive(0, 1, 2)
    assert len(ranks.reductions()) == before
    ranks.end()
    assert len(ranks.reductions()) == before + 3 and ranks.results() == mean(1.0)


@on_threads(2)
def test_gradients_that_arrive_more_than_once_wait_for_the_end(transport: LoopbackTransport) -> None:
    ranks = Reducing(transport)
    for turn in range(2):
        ranks.begin()
        ranks.arrive(0, 0, 1, 2)
        assert ranks.packed == ([] if turn == 0 else [1, 2]) and ranks.num_sent == 2 * turn
        ranks.end()
        first, *others = ranks.results()
        assert first == 2 * mean(1.0)[0] and others == mean(1.0)[1:]
        ranks.reducer.clear()
        ranks.packed.clear()


@on_threads(2)
def test_a_parameter_that_only_one_rank_used_counts_as_zero_on_the_other(transport: LoopbackTransport) -> None:
    ranks = Reducing(transport)
    for _ in range(2):
        ranks.backward(*((0, 1, 2) if transport.rank == 0 else (0, 2)))
        assert ranks.results() == [1.5, 1.0, 3.5]
        used = [gradients.used[0] for gradients in ranks.reducer.buckets]
        assert used == [True, transport.rank == 0, True]
        ranks.reducer.clear()


@on_threads(2)
def test_no_sync_leaves_sums_that_settle_reduces(transport: LoopbackTransport) -> None:
    ranks = Reducing(transport, stage=2)
    ranks.backward(*((0, 1, 2) if transport.rank == 0 else (0, 2)), reduces=False)
    assert ranks.reductions() == [] and ranks.results() == [None] * 3
    ranks.reducer.settle()
    assert ranks.results() == [1.5, 1.0, 3.5]
    ranks.reducer.settle()  # nothing is left
    assert len(ranks.reductions()) == 3


@on_threads(2)
def test_sums_of_some_ranks_are_sent_in_the_dtype_of_sums_from_all(transport: LoopbackTransport) -> None:
    ranks = Reducing(transport, stage=2, dtype=torch.bfloat16)
    for _ in range(2):
        ranks.begin(reduces=False, last=False)
        if transport.rank == 0:
            ranks.arrive(0, 1, 2)
        ranks.end()
        ranks.backward(0, 1, 2)
        assert ranks.results() == [2.0, 3.5, 5.0]
        ranks.reducer.clear()


@on_threads(2)
def test_gradients_that_were_put_by_hand_are_settled_too(transport: LoopbackTransport) -> None:
    ranks = Reducing(transport, stage=1)
    for number, parameter in enumerate(ranks.params):
        parameter.grad = torch.full_like(parameter, number + 1.0 + transport.rank)
    ranks.reducer.settle()
    assert ranks.results() == mean(1.0)
    ranks.reducer.zero_grad()
    ranks.params[0].grad = torch.ones_like(ranks.params[0])
    ranks.reducer.zero_grad()
    assert ranks.params[0].grad is None and ranks.results() == [None] * 3


@on_threads(2)
def test_where_ranks_keep_their_own_nothing_is_sent(transport: LoopbackTransport) -> None:
    ranks = Reducing(transport, stage=2)
    ranks.reducer.keeps_own = True
    ranks.backward(0, 1, 2)
    ranks.backward(0, 1, 2)
    ranks.reducer.settle()
    assert ranks.reductions() == [] and not ranks.reducer.is_reducing
    sums = [gradients.sum.local for gradients in ranks.reducer.buckets]
    assert [None if one is None else one.tensor[0].item() for one in sums] == [
        2 * (number + 1 + transport.rank) for number in range(3)
    ]


@on_threads(2)
def test_a_failed_backward_is_taken_out(transport: LoopbackTransport) -> None:
    ranks = Reducing(transport, stage=2)
    ranks.backward(0, 1, 2, last=False)
    ranks.begin()
    ranks.arrive(2)  # and then an exception, before it is this bucket's turn
    assert ranks.reducer.is_open and not ranks.reducer.is_mixed
    ranks.drop(with_sums=False)
    assert not ranks.reducer.is_open and all(parameter.grad is None for parameter in ranks.params)
    ranks.backward(0, 1, 2)
    assert ranks.results() == [2 * value for value in mean(1.0)]


@on_threads(2)
def test_a_failed_backward_that_was_added_takes_the_sum_with_it(transport: LoopbackTransport) -> None:
    ranks = Reducing(transport, stage=2)
    ranks.backward(2, 1, 0, last=False)
    ranks.begin()
    ranks.arrive(2, 1)
    assert ranks.reducer.is_mixed
    ranks.drop(with_sums=True)
    assert ranks.results()[1:] == [None, None]
    ranks.backward(2, 1, 0)
    assert ranks.results() == mean(1.0)


@on_threads(2)
def test_a_gradient_outside_a_backward_opens_one_or_raises(transport: LoopbackTransport) -> None:
    ranks = Reducing(transport)
    ranks.arrive(0)
    assert ranks.strays == 1 and ranks.reducer.is_open
    ranks.arrive(1, 2)
    assert ranks.strays == 1
    ranks.end()
    assert ranks.results() == mean(1.0)
    ranks.reducer.clear()
    ranks.reducer.remove()
    ranks.arrive(0)
    assert ranks.strays == 1 and ranks.params[0].grad is not None  # nobody listens any more


@on_threads(2)
def test_a_bucket_that_is_trained_later_is_collected_from_then_on(transport: LoopbackTransport) -> None:
    ranks = Reducing(transport)
    ranks.backward(0, 1, 2)
    ranks.reducer.clear()
    late = nn.Parameter(torch.zeros(9))
    ranks.reducer.add(bucket_of(transport, [late], is_sharded=False, index=3), GradientDestination())
    everything = range(4)
    for _ in range(2):
        now = ranks.passes.begin(ModelPhase.BACKWARD)
        ranks.reducer.begin(now, reaches=everything, reduces=frozenset(everything), closes=frozenset(everything))
        ranks.arrive(0, 1, 2)
        (late * (8.0 + transport.rank)).sum().backward()
        ranks.end()
        result = ranks.reducer.buckets[3].result
        assert result is not None and result[0].item() == 8.5
        ranks.reducer.clear()


def test_few_reductions_are_in_flight() -> None:
    def body(transport: LoopbackTransport) -> int:
        ranks = Reducing(transport)
        ranks.backward(0, 1, 2)
        ranks.reducer.clear()
        ranks.begin()
        most = 0
        for number in range(3):
            ranks.arrive(number)
            most = max(most, len(ranks.reducer._in_flight))
        ranks.end()
        assert not ranks.reducer._in_flight
        return most

    assert run_threads(body, 2) == [2, 2]


@on_threads(2)
def test_uneven_ranks_reduce_at_the_end_where_one_order_is_needed(transport: LoopbackTransport) -> None:
    ranks = Reducing(transport, needs_one_order=True)
    ranks.backward(0, 1, 2)
    ranks.reducer.clear()
    ranks.reducer.note_uneven()
    before = len(ranks.reductions())
    ranks.begin()
    ranks.arrive(0, 1, 2)
    assert len(ranks.reductions()) == before
    ranks.end()
    assert ranks.results() == mean(1.0)
