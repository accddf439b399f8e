"""The gradients of one bucket (``zero.gradient.gradient_bucket``), on ranks that are threads."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.comm.codecs.table import CODECS
from deepspeed.comm.transports.transport import LocalTransport, Transport
from deepspeed.errors import CallOrderError
from deepspeed.zero.gradient.error_feedback import feedback_numel
from deepspeed.zero.gradient.gradient_bucket import GradientBucket, GradientState
from deepspeed.zero.gradient.gradient_sum import GradientDestination
from deepspeed.zero.group import BucketGroup
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import MemoryTracker, StorageKind
from tests.harness import on_threads
from tests.harness.loopback import LoopbackTransport, run_threads
from tests.zero.alone import bucket_of, policy_of

SHAPES = [(9, 11), (130,), (3, 5)]


class Filling:
    """A resident bucket of three parameters and its gradients."""

    def __init__(
        self, transport: Transport, stage: int = 1, dtype: torch.dtype = torch.float32, codec: str = "", **settings: Any
    ) -> None:
        self.transport = transport
        self.memory_tracker = MemoryTracker()
        group = BucketGroup.over(transport)
        if codec:
            group = replace(group, reduce_codec=CODECS[codec].codec())
        self.bucket = bucket_of(
            transport,
            [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES],
            is_sharded=False,
            group=group,
            memory_tracker=self.memory_tracker,
        )
        self.gradients = GradientBucket(
            self.bucket, policy_of(stage, **settings), self.memory_tracker, GradientDestination()
        )

    def fill(self, step: int = 0, absent: tuple[int, ...] = (), *, last: bool = True) -> None:
        """Gradients arrive."""
        self.gradients.begin_backward(is_last=last)
        for index, (parameter, grad) in enumerate(
            zip(self.bucket.params, gradients_of(step, self.transport.rank), strict=True)
        ):
            if index not in absent:
                parameter.grad = grad.to(parameter.dtype)
                self.gradients.arrive(index)

    def reduce(self, *, as_sum: bool = False) -> torch.Tensor:
        """The result, as the whole bucket lies."""
        self.gradients.start_reduction(as_sum=as_sum)
        assert self.gradients.state is GradientState.REDUCING
        self.gradients.finish_reduction()
        assert self.gradients.state is GradientState.REDUCED and self.gradients.result is not None
        return self.gradients.result

    def flat(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """Gradients as they lie in the bucket."""
        found = torch.zeros(self.bucket.layout.numel)
        for grad, start in zip(grads, self.bucket.layout.starts, strict=True):
            found[start : start + grad.numel()] = grad.reshape(-1)
        return found

    def mean(self, *steps: int, absent: tuple[int, ...] = ()) -> torch.Tensor:
        """The result of plain arithmetic, of this rank's part."""
        total = torch.zeros(self.bucket.layout.numel)
        for step in steps:
            for rank in range(self.transport.size):
                grads = [g * (n not in absent) for n, g in enumerate(gradients_of(step, rank))]
                total += self.flat(grads) / self.transport.size
        return self.transport.my_slice(total) if self.gradients._policy.to_owner else total


def gradients_of(step: int, rank: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"divides_first": True}, {"predivide": 4.0}, {"is_mean": False}])
@on_threads(2)
def test_the_factors_around_the_sum(transport: LoopbackTransport, stage: int, settings: dict[str, Any]) -> None:
    filling = Filling(transport, stage, **settings)
    filling.fill()
    assert filling.gradients.has_arrivals
    filling.gradients.pack()
    assert all(parameter.grad is None for parameter in filling.bucket.params) and filling.bucket.gradients_in
    expected = filling.mean(0) * (1 if settings.get("is_mean", True) else transport.size)
    torch.testing.assert_close(filling.reduce(), expected, **CLOSE)


@on_threads(2)
def test_squares_that_are_taken_on_the_way_are_those_of_the_result(transport: LoopbackTransport) -> None:
    filling = Filling(transport)
    assert filling.gradients.sum_of_squares() is None
    for last in (True, False):
        filling.fill(last=last)
        filling.gradients.pack()
        result = filling.reduce()
        assert (filling.gradients.sum.squares is not None) is last
        squares = filling.gradients.sum_of_squares()
        assert squares is not None and squares.item() == pytest.approx(result.double().square().sum().item())
        filling.gradients.clear()
    filling.fill()
    filling.gradients.keep()
    own = filling.gradients.sum_of_squares()  # of its own sum, where nothing is reduced
    expected = filling.flat(gradients_of(0, transport.rank)).double().square().sum().item()
    assert own is not None and own.item() == pytest.approx(expected)


@on_threads(2)
def test_sums_of_micro_batches_are_added_before_or_after_the_reduction(transport: LoopbackTransport) -> None:
    filling = Filling(transport, 1)
    filling.fill(0)
    filling.gradients.keep()
    filling.fill(1)
    filling.gradients.pack()
    torch.testing.assert_close(filling.reduce(as_sum=True), filling.mean(0, 1), **CLOSE)
    filling.gradients.clear()
    for step in range(3):
        filling.fill(step)
        filling.gradients.pack()
        filling.reduce()
    torch.testing.assert_close(filling.gradients.result, filling.mean(0, 1, 2), **CLOSE)
    assert filling.gradients.used == [True] * 3


@on_threads(2)
def test_reduced_sums_over_micro_batches_have_the_dtype_of_sums(transport: LoopbackTransport) -> None:
    for stage, expected in ((1, torch.float32), (2, torch.bfloat16)):
        filling = Filling(transport, stage, torch.bfloat16, accumulate_dtype=torch.bfloat16)
        filling.fill()
        filling.gradients.pack()
        assert filling.reduce().dtype is expected
    double = Filling(transport, 1, torch.float64)
    double.fill()
    double.gradients.pack()
    assert double.reduce().dtype is torch.float64


@on_threads(2)
def test_absent_gradients_count_as_zero_and_padding_stays_zero(transport: LoopbackTransport) -> None:
    filling = Filling(transport, 0)
    filling.fill(5)
    filling.gradients.pack()
    filling.reduce()
    filling.gradients.clear()
    filling.fill(0, absent=(1,))
    filling.gradients.pack()
    torch.testing.assert_close(filling.reduce(), filling.mean(0, absent=(1,)), **CLOSE)
    assert filling.gradients.used == [True, False, True]


def test_a_frozen_parameter_is_not_waited_for_and_a_late_one_is_found() -> None:
    filling = Filling(LocalTransport())
    filling.bucket.params[0].requires_grad_(False)
    filling.gradients.begin_backward()
    assert not filling.gradients.arrive(1)
    filling.bucket.params[2].grad = torch.ones(3, 5)
    assert filling.gradients.holds_unannounced
    filling.gradients.note_unannounced()
    assert filling.gradients._missing == 0 and filling.gradients.state is GradientState.FILLING


@on_threads(2)
def test_a_second_arrival_is_noted_and_too_late_after_the_reduction(transport: LoopbackTransport) -> None:
    filling = Filling(transport)
    filling.fill()
    assert not filling.gradients.repeats
    assert not filling.gradients.arrive(1) and filling.gradients.repeats
    filling.gradients.pack()
    filling.reduce()
    with pytest.raises(CallOrderError, match="'p1' arrived again after its bucket was reduced"):
        filling.gradients.arrive(1)


def test_a_group_of_one_reads_the_packed_buffer_and_keeps_it() -> None:
    filling = Filling(LocalTransport())
    for step in range(2):
        filling.fill(step)
        filling.gradients.pack()
        torch.testing.assert_close(filling.reduce(), filling.mean(step), **CLOSE)
        assert filling.gradients.sum.is_packed and filling.gradients.sum.squares is not None
        filling.gradients.clear()
        assert filling.gradients.result is None
        assert filling.memory_tracker.live(StorageKind.GRADIENT_BUCKET, Tier.DEVICE) == filling.bucket.layout.numel * 4
    filling.gradients.free_idle_buffer()
    assert filling.memory_tracker.live(StorageKind.GRADIENT_BUCKET, Tier.DEVICE) == 0
    for step in range(2):
        filling.fill(step)
        filling.gradients.pack()
        filling.reduce()
    torch.testing.assert_close(filling.gradients.result, filling.mean(0, 1), **CLOSE)


@pytest.mark.parametrize("stage", [0, 1])
def test_error_feedback_pays_back_what_codes_have_lost(stage: int) -> None:
    def body(transport: LoopbackTransport) -> tuple[torch.Tensor, torch.Tensor]:
        filling = Filling(transport, stage, codec="int4")
        feedback, layout = filling.gradients.feedback, filling.bucket.layout
        assert feedback is not None
        assert feedback.tensor.numel() == feedback_numel(layout, to_owner=stage >= 1)
        assert (feedback.reduction.owned is None) is (stage >= 1)
        total = torch.zeros_like(filling.mean(0))
        for _ in range(40):
            filling.fill()
            filling.gradients.pack()
            total += filling.reduce()
            filling.gradients.commit()
            filling.gradients.clear()
        return total / 40, filling.mean(0)

    for found, expected in run_threads(body, 2):
        assert 0 < float((found - expected).abs().max()) < 0.03  # one exchange alone is off by up to 0.2


@on_threads(2)
def test_a_skipped_update_leaves_the_errors_as_they_were(transport: LoopbackTransport) -> None:
    filling = Filling(transport, 1, codec="int4", may_skip=True)
    feedback = filling.gradients.feedback
    assert feedback is not None
    assert filling.memory_tracker.live(StorageKind.PRIVATE, Tier.DEVICE) == 2 * 4 * feedback.tensor.numel()

    def exchange(step: int) -> None:
        filling.fill(step)
        filling.gradients.pack()
        filling.reduce()

    exchange(0)
    filling.gradients.commit()
    filling.gradients.clear()
    kept = feedback.tensor.clone()
    assert bool(kept.any())
    exchange(1)
    exchange(2)  # another micro-batch of the same update
    assert not torch.equal(feedback.tensor, kept)
    filling.gradients.scale_feedback(0.5)
    filling.gradients.clear()
    assert torch.equal(feedback.tensor, 0.5 * kept)


@on_threads(2)
def test_early_gradients_are_sent_as_they_are(transport: LoopbackTransport) -> None:
    filling = Filling(transport, 1, codec="sign", codes_from=1)
    assert not filling.gradients.is_coded
    filling.fill()
    filling.gradients.pack()
    torch.testing.assert_close(filling.reduce(), filling.mean(0), **CLOSE)
    assert filling.gradients.feedback is not None and not bool(filling.gradients.feedback.tensor.any())


@on_threads(2)
def test_a_backward_that_failed_is_dropped(transport: LoopbackTransport) -> None:
    filling = Filling(transport, 2)
    filling.fill(0)
    filling.gradients.keep()
    filling.fill(1)
    filling.gradients.keep()
    assert filling.gradients.is_mixed(reduced=False)
    filling.gradients.drop_backward(reduced=False, with_sum=True)
    assert filling.gradients.sum.is_empty and filling.gradients.used == [False] * 3
    filling.fill(0)
    filling.gradients.keep()
    filling.fill(1, absent=(0,))
    assert not filling.gradients.is_mixed(reduced=False)
    filling.gradients.drop_backward(reduced=False, with_sum=False)
    assert not filling.gradients.sum.is_empty and filling.bucket.params[1].grad is None
    assert filling.gradients.first_not_finite() is None
    local = filling.gradients.sum.local
    assert local is not None
    local.tensor[filling.bucket.layout.starts[1]] = torch.nan
    assert filling.gradients.first_not_finite() == 1
    own, factor = filling.gradients.take_own_sum()
    assert own is local and factor == 1.0 and filling.gradients.sum.is_empty
