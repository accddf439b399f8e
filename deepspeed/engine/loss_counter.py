"""Losses that are sums over tokens: the divisor of their gradients, which is known only at the update.

A mean over the tokens of an update cannot be computed micro-batch by micro-batch: each has its own number of tokens,
on each rank. So the gradients of the sums are added up, and the update divides them once by the tokens of all ranks and
micro-batches. Before that they are divided by a power of two near that number, equal on all ranks, so that 16-bit
gradients stay in range; dividing by it changes no digit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from typing_extensions import override

from deepspeed.comm.watch.wait_records import with_advice
from deepspeed.errors import CallOrderError, DeepSpeedConfigError, DivergenceError, PipelineError
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.tiling.layout import DATA

_FIRST_COUNT = with_advice(
    "the token counts of the first losses (engine.backward(loss, count=...))",
    "The first loss with a count needs the counts of all ranks. Pass count on every rank, 0 where a rank has no "
    "tokens, or on none",
)


class LossCounter:
    """Counts the tokens (or samples) of the losses of one update, and determines what its gradients are divided by."""

    def __init__(self, runtime: ZeroRuntime) -> None:
        self._runtime = runtime
        self._mine: list[Any] = []  # tensors are read at the update, so that no backward waits for the device
        self._scale = 0.0  # the power of two; 0 before it is known
        self._is_counted: bool | None = None  # of the losses since the last update

    def expect(self, tokens: int) -> None:
        """Chooses the first scale from an estimate of the tokens per rank and update, which is equal on all ranks.

        Called before the backwards of an update; later updates take what was counted in the one before.
        """
        if not self._scale:
            self._scale = _near(float(tokens))

    def begin_sum(self, count: Any, micro_batches: int) -> float:
        """Returns the divisor of a loss that is a sum, before its backward. Every rank must call it alike.

        Raises:
            CallOrderError: Another loss of the update is a mean.
            DeepSpeedConfigError: The count of some rank is negative or not finite; the same on every rank.
        """
        self._note_kind(is_counted=True)
        if not self._scale:
            mine = torch.tensor([float(count)], dtype=torch.float64)
            counts = self._runtime.groups.job.gather_small(mine, channel="call", label=_FIRST_COUNT)
            refuse_bad_counts(counts)
            self._scale = _near(float(counts.mean()) * micro_batches)
        return self._scale

    def note_mean(self) -> None:
        """Called for a loss that is a mean; its gradients are not divided here.

        Raises:
            CallOrderError: Losses of the same update have a count.
        """
        self._note_kind(is_counted=False)

    @property
    def has_sums(self) -> bool:
        """Returns whether losses since the last update are sums with a count."""
        return bool(self._is_counted)

    def note_gradients(self) -> None:
        """Called before a backward of gradients that another part of the model computed.

        Raises:
            CallOrderError: Losses of the same update have a count.
        """
        self.note_mean()

    def _note_kind(self, *, is_counted: bool) -> None:
        if self._is_counted not in (None, is_counted):
            raise CallOrderError(
                "engine.backward(loss, count=...): some losses since the last update have a count, and others "
                "have none; give every one a count (its loss is then a sum), or none (means). After "
                "engine.zero_grad() you can start again"
            )
        self._is_counted = is_counted

    def add(self, count: Any) -> None:
        """Adds the tokens of a loss whose backward returned. A backward that raised leaves no gradient."""
        self._mine.append(count)

    def numbers(self) -> list[float]:
        """Returns the numbers that the ranks of the job exchange in the update; equally many on every rank.

        A count that is none is sent as it is, so that every rank raises for it.
        """
        kind = _UNKNOWN if self._is_counted is None else _COUNTED if self._is_counted else _MEAN
        counts = read_counts(self._mine)
        return [kind, next((count for count in counts if not is_count(count)), sum(counts, start=0.0))]

    def divisor_of(self, rows: torch.Tensor) -> float:
        """Returns the divisor of the gradients.

        Args:
            rows: One row for every rank of the job: 2-D, fp64, :meth:`numbers` in the last columns.

        Raises:
            DeepSpeedConfigError: The count of some rank is negative or not finite; the same on every rank.
            DivergenceError: Losses of some ranks are sums with a count, of others means; the same on every rank.
        """
        counts = self._counts_of(rows)
        return 1.0 if counts is None else self._divisor(counts)

    def _counts_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Returns the counts of the ranks whose losses are sums, 1-D; None where losses are means."""
        kinds = rows[:, -2]
        is_counted = kinds == _COUNTED
        if not bool(is_counted.any()):
            return None
        refuse_bad_counts(rows[:, -1:])
        if bool((kinds == _MEAN).any()):
            raise self._mixed_kinds(int(is_counted.nonzero()[0]), int((kinds == _MEAN).nonzero()[0]))
        return rows[is_counted, -1]

    def _mixed_kinds(self, counted: int, mean: int) -> Exception:
        """Returns the error for a loss with a count on rank ``counted`` and one without on rank ``mean``."""
        return DivergenceError(
            f"engine.backward(loss, count=...): expected a count on all ranks or on none, found that rank {counted} "
            f"gave one since the last update and rank {mean} did not. Pass count on every rank, 0 where a rank has no "
            "tokens"
        )

    def _divisor(self, counts: torch.Tensor) -> float:
        """Returns what the mean gradient is still divided by, after the division of losses by :meth:`begin_sum`."""
        total = float(counts.sum()) / self._copies()
        if not total:
            return 1.0  # every gradient is zero
        reducer = self._runtime.reducer
        assert reducer is not None
        return total / (self._scale * (self._runtime.groups.by_name[DATA].divisor if reducer.policy.is_mean else 1))

    def _copies(self) -> int:
        """Returns the number of ranks that count the same tokens."""
        groups = self._runtime.groups
        return groups.job.size // groups.peers.size  # they hold other parts of the model

    def end_update(self, rows: torch.Tensor) -> None:
        """Starts over after an update, with the power of two that fits its tokens (``rows``: 2-D, of all ranks)."""
        counts = self._counts_of(rows)
        if counts is not None and (mean := float(counts.mean())):
            fitting = _near(mean)
            if fitting != self._scale:
                assert self._runtime.reducer is not None
                self._runtime.reducer.scale_feedback(self._scale / fitting)  # the unit of gradients has changed
                self._scale = fitting
        self.clear()

    def clear(self) -> None:
        """Forgets the losses since the last update. Called when their gradients are discarded."""
        self._mine, self._is_counted = [], None


class PipelineLossCounter(LossCounter):
    """Counts the tokens of one update of a pipeline, which only its last stages see.

    The other stages learn the sum in the exchange of the update. Nothing can be gathered while micro-batches run
    through the stages, so the first power of two comes from the sizes of the labels.
    """

    def __init__(self, runtime: ZeroRuntime, stages: int) -> None:
        super().__init__(runtime)
        self._stages = stages

    @override
    def begin_sum(self, count: Any, micro_batches: int) -> float:
        self._note_kind(is_counted=True)
        return self._scale

    @override
    def note_gradients(self) -> None:
        """Does nothing: only the last stage has losses, and it records itself whether they have counts."""

    @override
    def _mixed_kinds(self, counted: int, mean: int) -> Exception:
        return CallOrderError(
            f"train_batch: the loss_fn of rank {counted} returns (sum, count), that of rank {mean} a mean; let it "
            "return the same on every copy of the model"
        )

    @override
    def _copies(self) -> int:
        return max(super()._copies() // self._stages, 1)


_UNKNOWN, _MEAN, _COUNTED = 0.0, 1.0, 2.0
"""Kinds of losses that a rank reports with an update; not known on a rank without a loss, as the first stages."""


def _near(value: float) -> float:
    """Returns the power of two near a positive number; 1 for smaller ones."""
    return 2.0 ** round(math.log2(value)) if value > 1 else 1.0


def checked_count(count: Any, where: str = "engine.backward(loss, count=...)") -> Any:
    """Returns ``count`` as a float, or as a detached 0-dim tensor whose value is not read yet.

    Its value is checked where the ranks exchange it (:func:`refuse_bad_counts`), so that all of them raise.

    Raises:
        DeepSpeedConfigError: It is no number and no tensor of one element.
    """
    if isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_complex():
        number = count.detach().reshape(())
        return number.long() if number.dtype == torch.bool else number
    if isinstance(count, Real):  # numpy's numbers too
        return float(count)
    found = f"a tensor of shape {tuple(count.shape)}" if isinstance(count, torch.Tensor) else repr(count)[:80]
    raise DeepSpeedConfigError(
        f"{where}: expected the number of tokens in this rank's loss, as a number or a tensor of one element, "
        f"found {found}. Pass for example (labels != -100).sum()"
    )


def checked_metric(name: str, value: Any, device: torch.device) -> torch.Tensor:
    """Returns a metric that was returned with the loss: 0-dim, fp32, on ``device``, detached.

    Raises:
        PipelineError: It is no number and no tensor of one element.
    """
    try:
        number = torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or number.numel() != 1 or number.is_complex():
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
        raise PipelineError(
            f"the metric {name!r}, given beside the loss, is {what}; expected a number or a tensor of one element, of "
            "which the mean over micro-batches is taken"
        )
    return number.detach().float().reshape(())


def mean_of_sum(total: torch.Tensor, count: Any) -> torch.Tensor:
    """Returns ``total / count``, of the shape of ``total`` (one element); 0 where ``count`` is 0.

    Args:
        total: The loss summed over tokens.
        count: Tokens, as :func:`checked_count` returns it.
    """
    if not isinstance(count, torch.Tensor):
        return total / (count or 1.0)
    divisor = torch.where(count == 0, 1, count).to(total.device)
    wide = torch.promote_types(total.dtype, torch.float32)  # counts may be too large for fp16
    return (total.to(wide) / divisor).to(torch.result_type(total, divisor))


def read_counts(counts: Sequence[Any]) -> list[float]:
    """Returns counts as numbers. Waits for the device once, for all tensors together."""
    tensors = [count.double() for count in counts if isinstance(count, torch.Tensor)]
    read = iter(torch.stack([each.to(tensors[0].device) for each in tensors]).tolist() if tensors else ())
    return [next(read) if isinstance(count, torch.Tensor) else float(count) for count in counts]


def is_count(number: float) -> bool:
    """Returns whether ``number`` may be a number of tokens."""
    return number >= 0 and math.isfinite(number)


def refuse_bad_counts(counts: torch.Tensor) -> None:
    """Checks the counts of all ranks of the job.

    Args:
        counts: One row for every rank: 2-D, fp64.

    Raises:
        DeepSpeedConfigError: One of them is negative or not finite.
    """
    for rank, row in enumerate(counts.tolist()):
        for number in row:
            if not is_count(number):
                raise DeepSpeedConfigError(
                    f"engine.backward(loss, count={number:g}) on rank {rank}: expected the number of tokens in the "
                    "loss of that rank, finite and 0 or more (in a pipeline, the count that loss_fn returns). Pass for "
                    "example (labels != -100).sum()"
                )
