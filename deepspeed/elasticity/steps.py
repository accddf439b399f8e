"""The steps of a run whose number of ranks changes: each step has the same samples on any number of ranks."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate

from deepspeed.elasticity.continuation import Continuation, continuation_of
from deepspeed.elasticity.elastic_run import CopyCost, Recovery
from deepspeed.engine.engine import EngineBase
from deepspeed.errors import CallOrderError, DeepSpeedConfigError, DeepSpeedError
from deepspeed.logging import warn_once


class AssignedMicroBatch(NamedTuple):
    """One micro-batch of a rank."""

    number: int  # number of the micro-batch in the update, over all ranks
    counts: bool  # Whether its loss counts. False for a repeated micro-batch, run because other ranks have one more.


def assign_micro_batches(micro_batches: int, ranks: int, rank: int) -> list[AssignedMicroBatch]:
    """Returns the micro-batches of a rank: consecutive ones, the same number on all ranks.

    Every rank runs the same number of backwards, since at stages 2 and 3 all ranks take part in each. If the
    micro-batches are not a multiple of the ranks, some ranks repeat one whose loss does not count.

    Args:
        micro_batches: Micro-batches of the update, over all ranks.
    """
    each, more = divmod(micro_batches, ranks)
    start = rank * each + min(rank, more)
    own = [AssignedMicroBatch(number, True) for number in range(start, start + each + (rank < more))]
    rounds = each + (more > 0)
    return own + [AssignedMicroBatch(start % micro_batches, False)] * (rounds - len(own))


class ElasticStep:
    """One update. Entered as a context manager; iterated over, it yields this rank's micro-batches."""

    setting = "elasticity.continue"

    def __init__(self, steps: ElasticSteps, number: int, assigned: Sequence[AssignedMicroBatch]) -> None:
        self.number = number  # number of updates before it
        self.is_done = False  # Whether all ranks have made the update. False after a loss: the step is then repeated.
        self.loss: float | None = None  # mean over the micro-batches of all ranks once the update was made; else None
        self._steps = steps
        self._assigned = assigned
        self._weight = 0.0
        self._sum: torch.Tensor | None = None
        self._started = 0.0
        self.must_regroup = False  # whether the ranks change after this step, because processes join
        # whether a rank's copies have moved to other memory, which its buddy opens after this step
        self.must_open_copies = False
        self.was_entered = False  # whether the step was entered by ``with``

    def __enter__(self) -> ElasticStep:
        self._started = time.monotonic()
        self.was_entered = True
        self._steps.open_step(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return self._steps.close_step(self, error)

    def __iter__(self) -> Iterator[Any]:
        """Yields the micro-batches of this rank: call forward, ``engine.backward`` and ``engine.step`` for each."""
        for assigned in self._assigned:
            self._weight = float(assigned.counts)
            yield self._steps.micro_batch(self.number, assigned.number)

    @property
    def seconds(self) -> float:
        """Seconds since the step was entered."""
        return time.monotonic() - self._started

    # -- called by the engine (``engine_feature.UnevenBatch``) ---------------------------------------------------------

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns ``loss`` (0-dim) scaled so that the gradients' mean over ranks is that over all micro-batches."""
        weighed = loss * (self._weight * self._steps.loss_factor)
        found = weighed.detach().float().reshape(())
        self._sum = found if self._sum is None else self._sum + found
        return weighed

    def numbers(self) -> Sequence[float]:
        """Returns this rank's part of the mean loss, its number of join requests, and whether its copies have moved."""
        continuation = self._steps._continuation
        loss = 0.0 if self._sum is None else float(self._sum)
        return loss, float(continuation.joining), float(continuation.must_open_copies)

    def take(self, rows: torch.Tensor) -> None:
        """Processes the results of :meth:`numbers` of all ranks: fp64 ``[ranks, 3]``."""
        self.loss = float(rows[:, 0].mean())
        joining = int(rows[:, 1].sum())
        self.must_open_copies = bool(rows[:, 2].any())
        self.must_regroup = joining > 0 and self._steps._continuation.can_grow(joining)


def _integer_seed(seed: Any) -> int:
    """Returns a seed as the ``int`` that torch requires; numpy's integers are of other types."""
    try:
        return operator.index(seed)
    except TypeError:
        raise DeepSpeedConfigError(
            f"deepspeed.elasticity.ElasticSteps: seed={seed!r}: expected an integer, found {type(seed).__name__}; "
            "pass an integer"
        ) from None


class ElasticSteps:
    """Yields the steps of a run, each again until all present ranks have made its update.

    Step *s* has samples ``[s * B, (s + 1) * B)`` of an endless sequence of permutations of the data set, which follow
    from the seed; *B* is ``train_batch_size``. So every sample is used once per epoch, in the same update for any
    number of ranks. Every rank must make one, and may make another one after its last step.

    Args:
        engine: An engine with ``elasticity.continue`` in its configuration.
        dataset: Has ``len()`` and ``[index]``, equal on all ranks.
        total_steps: Updates of the run, including those before a loaded checkpoint.
        collate_fn: Makes a micro-batch from a list of samples; None: torch's ``default_collate``.
        shuffle: Use a new random order of samples in every epoch; otherwise the order of the data set.
        seed: The seed of the random orders.
        checkpoints: A checkpoint folder that the run saves to or has loaded from. If all copies of some states are
            lost, the run continues from the last checkpoint there. None: the folder that was used last.

    Raises:
        CallOrderError: The engine has no ``elasticity.continue``.
        DeepSpeedConfigError: The data set is empty, or the seed is not an integer.
    """

    def __init__(
        self,
        engine: Any,
        dataset: Any,
        total_steps: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        checkpoints: str | os.PathLike[str] | None = None,
    ) -> None:
        if len(dataset) == 0:
            raise DeepSpeedConfigError(
                "deepspeed.elasticity.ElasticSteps: expected a data set with samples, found an empty one; pass another"
            )
        self._seed = _integer_seed(seed)
        self._engine: EngineBase = engine
        self._continuation: Continuation = continuation_of(engine).reopen()
        self._continuation.run.checkpoints = checkpoints
        self._dataset = dataset
        self._total = total_steps
        self._collate = collate_fn or default_collate
        self._shuffle = shuffle
        self._order: tuple[int, torch.Tensor] = (-1, torch.empty(0, dtype=torch.int64))

    @property
    def recoveries(self) -> list[Recovery]:
        """All recoveries and joins of ranks so far, with their durations in seconds."""
        return self._continuation.run.recoveries

    @property
    def copy_cost(self) -> CopyCost:
        """The cost of copies of model states so far."""
        return self._continuation.run.cost

    @property
    def has_join_requests(self) -> bool:
        """Whether this process has a join request."""
        return self._continuation.joining > 0

    @property
    def has_knocks(self) -> bool:
        """The old name of :attr:`has_join_requests`; logs a warning once."""
        warn_once("has_knocks", "ElasticSteps.has_knocks is an old name of ElasticSteps.has_join_requests; use that")
        return self.has_join_requests

    @property
    def loss_factor(self) -> float:
        """Factor on a loss that makes the mean over ranks the mean over all micro-batches."""
        return self._continuation.data_size / self._micro_batches

    @property
    def _micro_batches(self) -> int:
        return self._engine.train_batch_size() // self._engine.train_micro_batch_size_per_gpu()

    def __iter__(self) -> Iterator[ElasticStep]:
        while True:
            while self._engine.global_steps < self._total:
                if self._continuation.is_replaced and not self._run_between_steps(self._continuation.replace_copies):
                    continue
                number = self._engine.global_steps
                ranks, rank = self._continuation.data_size, self._continuation.data_rank
                step = ElasticStep(self, number, assign_micro_batches(self._micro_batches, ranks, rank))
                yield step
                if not step.was_entered:
                    raise CallOrderError(
                        f"ElasticSteps: step {number} was not entered; write `with step:` around its micro-batches"
                    )
            if self._run_between_steps(self._continuation.finish):
                self._continuation.leave()
                return

    # -- samples -------------------------------------------------------------------------------------------------------

    def micro_batch(self, step: int, number: int) -> Any:
        """Returns micro-batch ``number`` of a step, counted over all ranks."""
        size = self._engine.train_micro_batch_size_per_gpu()
        first = step * self._engine.train_batch_size() + number * size
        return self._collate([self._dataset[self.sample(position)] for position in range(first, first + size)])

    def sample(self, position: int) -> int:
        """Returns the index in the data set of the sample at ``position`` of the run."""
        epoch, place = divmod(position, len(self._dataset))
        if not self._shuffle:
            return place
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = epoch, torch.randperm(len(self._dataset), generator=generator)
        return int(self._order[1][place])

    # -- steps ---------------------------------------------------------------------------------------------------------

    def open_step(self, step: ElasticStep) -> None:
        """Opens a step."""
        self._continuation.begin_step(step)

    def close_step(self, step: ElasticStep, error: BaseException | None) -> bool:
        """Ends a step; returns True if ``error`` was caused by a lost rank, and so was handled.

        Args:
            error: The exception raised inside of it; None if there was none.

        Raises:
            CallOrderError: The engine has not made exactly one update in the step.
        """
        self._continuation.end_step()
        try:
            if error is not None:
                raise error
            if self._engine.global_steps != step.number + 1:
                raise CallOrderError(
                    f"ElasticSteps: after step {step.number} expected {step.number + 1} updates of the engine, "
                    f"found {self._engine.global_steps}; call engine.step() once for every micro-batch of the step"
                )
            self._continuation.after_update(ranks_will_change=step.must_regroup, must_open_copies=step.must_open_copies)
            step.is_done = True
            for recovery in self.recoveries[-1:]:
                recovery.first_step = recovery.first_step or step.seconds
            if step.must_regroup:
                self._change_ranks(step.number + 1)
        except (DeepSpeedError, RuntimeError) as failure:
            if not self._continuation.was_lost():
                if failure is error:
                    return False
                raise
            self._change_ranks(step.number)
            step.is_done = self._engine.global_steps > step.number
            step.loss = step.loss if step.is_done else None
            return True
        except BaseException as failure:
            if failure is error:
                return False
            raise
        return False

    def _run_between_steps(self, action: Callable[[], None]) -> bool:
        """Calls ``action`` between two steps; if ranks are lost meanwhile, changes the ranks and returns False."""
        try:
            action()
        except (DeepSpeedError, RuntimeError):
            if not self._continuation.was_lost():
                raise
            self._change_ranks(self._engine.global_steps)
            return False
        return True

    def _change_ranks(self, step: int) -> None:
        self._continuation = self._continuation.change_ranks(step)
