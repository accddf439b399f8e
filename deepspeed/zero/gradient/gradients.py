"""Schedules the reduction of all buckets of an engine, in one order on all ranks.

``zero.gradient.gradient_bucket`` handles one bucket, and has the policy of reduction.

Where the sum over micro-batches is kept depends on the placement: sharded gradients are reduced after every micro-batch
and added to the owner's accumulator; replicated ones are added up locally first and reduced once, at the boundary, as
DDP does (so does ``no_sync`` at every stage). With one micro-batch there is no accumulator: the reduced gradient is
used as it arrives.

Where only some ranks share the parameters (``comm.job.grid``), the sum has two steps. The first, among those that
share, is the one above; its result is a *partial* sum. The second, over the ranks with the same slices, runs at the
end of the backward (never inside it: a rank of another group may be holding a bucket back, and no gather reports that)
or, if they all keep the whole result, at the boundary.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable, Sequence, Set
from typing import Protocol

import torch

from deepspeed.comm.job import backward_comm
from deepspeed.comm.job.backward_comm import BackwardCommTracker
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import require_state
from deepspeed.logging import log_dist
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.gather.agreement import Agreement
from deepspeed.zero.gradient.arrival_hooks import ArrivalHooks
from deepspeed.zero.gradient.gradient_bucket import GradientBucket
from deepspeed.zero.gradient.gradient_sum import GradientDestination
from deepspeed.zero.gradient.program_gradients import GradientUnit, ProgramGradients, RunGradients
from deepspeed.zero.gradient.reduction_policy import ReductionPolicy
from deepspeed.zero.gradient.trial import Trial
from deepspeed.zero.passes import Pass, PassTracker, ReductionState
from deepspeed.zero.storage import MemoryTracker

_MAX_IN_FLIGHT = 2  # reductions in flight, without the one being filled
_SMALL = 2**23  # up to this many elements in flight the host does not wait for a device that lags behind,
_MOST_SMALL = 16  # and up to this many such reductions
_PATIENCE = 60.0  # seconds: how long the host waits for a reduction that a peer may be holding back


class GradientReader(Protocol):
    """Reads reduced gradients before the update."""

    def offer(self, position: int) -> None:
        """Called when the reduction of a bucket may be complete; see ``GradientBucket.is_final``."""

    def withdraw(self) -> None:
        """Called before gradients change or are freed; returns when they are not read any more."""


class GradientReducer:
    """Collects gradients of all trainable buckets and reduces them in one order on all ranks.

    The order is that in which buckets were completed on rank 0 in the first backward; until it is known, and for
    buckets with repeated arrivals, everything is reduced at the end of the backward.

    Args:
        needs_one_order: Gathers run during backward, and all ranks must issue them and reductions in one order.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        policy: ReductionPolicy,
        peers: Transport,
        memory_tracker: MemoryTracker,
        destinations: Sequence[GradientDestination],
        *,
        passes: PassTracker,
        agreement: Agreement,
        layers: BackwardCommTracker,
        needs_one_order: bool = False,
        runs: RunGradients | None = None,
    ) -> None:
        self.policy = policy
        self.is_coded = policy.begins_coded
        self._trial = Trial() if policy.is_trial else None
        # whether the next update exchanges something other than gradients, so that each rank keeps its own sum
        # unreduced
        self.keeps_own = False
        self.discards = 0  # how often all gradients were discarded or used
        self._overlaps = policy.overlap
        self._needs_one_order = needs_one_order
        self._has_partial_sums = False  # equal on all ranks
        self._peers = peers
        self._passes = passes
        self._agreement = agreement
        self._layers = layers
        self.buckets = [
            GradientBucket(bucket, policy, memory_tracker, destination)
            for bucket, destination in zip(buckets, destinations, strict=True)
        ]
        # what the program sees in ``.grad``, and has done to it
        self.program = ProgramGradients(self.buckets, self.stop_reading, runs)
        self._positions = {gradients: position for position, gradients in enumerate(self.buckets)}
        self._combines = any(bucket.group.combine is not None for bucket in buckets)
        self._combines_late = any(bucket.group.spans_stages for bucket in buckets)
        self._combines_to_owners = any(bucket.group.is_spread for bucket in buckets)
        self._orders: dict[frozenset[int], list[int]] = {}  # by what a backward reduces
        self._known: set[int] = set()  # buckets in any order: known whether their gradients arrive more than once
        self._in_flight: deque[GradientBucket] = deque()
        # Buckets that may have sums of earlier backwards: equal on all ranks, unlike those that do have one.
        self._local_sums: set[int] = set()
        self._hooks = ArrivalHooks(self.buckets, self)
        self._memory_tracker = memory_tracker
        self._in_one_order = all(bucket.group.reduce.needs_one_order for bucket in buckets)
        self._largest = max((bucket.layout.numel for bucket in buckets), default=0)
        self._reader: GradientReader | None = None
        self.listen(range(len(self.buckets)))

    def speculate(self, reader: GradientReader) -> None:
        """Offers each gradient to ``reader`` as soon as it is complete."""
        self._reader = reader

    def _offer(self, position: int) -> None:
        if self._reader is not None:
            self._reader.offer(position)

    def stop_reading(self) -> None:
        """Waits until no other thread reads gradients, masters or states; those readings are discarded."""
        if self._reader is not None:
            self._reader.withdraw()

    def add(self, bucket: Bucket, destination: GradientDestination) -> None:
        """Collects the gradients of one more bucket from now on. Every rank must call it, between two backwards."""
        require_state(not self.is_open, self, "no open backward")
        self.buckets.append(GradientBucket(bucket, self.policy, self._memory_tracker, destination))
        self.buckets[-1].is_coded = self.is_coded
        self._positions[self.buckets[-1]] = len(self.buckets) - 1
        self._largest = max(self._largest, bucket.layout.numel)
        self._orders.clear()
        self._known.clear()  # the ranks agree again at the end of the next backward
        self.listen([len(self.buckets) - 1])

    def listen(self, positions: Iterable[int]) -> None:
        """Collects gradients of the parameters of some buckets that require one now."""
        self._hooks.listen(positions)

    def arrive(self, position: int, index: int) -> None:
        """Called when autograd has delivered the gradient of parameter ``index`` of bucket ``position``."""
        now = self._passes.current
        if now is None or now.reductions is None:
            self.program.take_stray(position, index)
            self._passes.open_backward()
        if self.buckets[position].arrive(index):
            self._complete(position)

    def remove(self) -> None:
        """Takes the gradient hooks from the parameters."""
        if not self.is_coded and self._has_codecs and self._hooks and not self.policy.is_trial:
            log_dist(
                "communication_compression.gradients had no effect: training ends before update "
                f"{self.policy.codes_from + 1}, the first with compressed gradients (start_step)"
            )
        self._hooks.remove()

    # -- one backward ------------------------------------------------------------------------------------------------

    def begin(
        self,
        now: Pass,
        *,
        reaches: Sequence[int],
        reduces: frozenset[int],
        closes: Set[int],
        unit: GradientUnit | None = None,
    ) -> None:
        """Prepares the reductions of a backward that begins. All ranks must pass the same."""
        require_state(not self.is_open, self, "no open backward")
        self.stop_reading()
        self.program.apply()
        self.program.begin(unit)
        if self.keeps_own:
            reduces = frozenset()
        is_last = len(closes) == len(self.buckets)
        # Parts of a model end their backwards at different times, so sums that span them wait for the update.
        combines = (
            bool(reduces) and self._combines and not self._combines_late and (is_last or self._combines_to_owners)
        )
        now.reductions = ReductionState(reaches, reduces, self._orders.get(reduces), combines)
        self._hooks.move_behind_others(reaches)
        for position in reaches:
            self.buckets[position].begin_backward(is_last=position in closes)

    def _complete(self, position: int) -> None:
        """Called when every gradient of a bucket is there. Packs it now unless more may come."""
        backward = self._opened
        backward.completed.append(position)
        if self._agreement.serves:
            self.note_uneven()
        if position not in self._known or self.buckets[position].repeats or not self._overlaps:
            return
        if self._needs_one_order and backward_comm.is_uneven():
            return  # layers' exchanges and reductions must have one order, regardless of missing gradients
        if position in backward.reduces and backward.order is None:
            return
        self._pack(position, backward)
        if position in backward.reduces:
            assert backward.order is not None
            while backward.cursor < len(backward.order) and backward.order[backward.cursor] in backward.packed:
                self._send(backward.order[backward.cursor])
                backward.cursor += 1

    def _pack(self, position: int, backward: ReductionState) -> None:
        gradients = self.buckets[position]
        if position in backward.reduces:
            gradients.pack()
        else:
            gradients.keep()
        backward.packed.add(position)
        self._passes.note_gradients(gradients.bucket)

    def _send(self, position: int, *, is_over: bool = False) -> None:
        """Starts a reduction and finishes older ones, without waiting for a peer that may be waiting for this rank.

        A peer with unused parameters in a bucket sends it only at the end of its backward, and may need gathers from
        this rank before. So during backward this waits only for reductions that all peers are known to have started. If
        a device runs the transfers, only their completion shows that; the host waits a limited time for it.
        """
        while len(self._in_flight) >= _MAX_IN_FLIGHT:
            # with all gathers issued that its peers need, this rank may wait for their part of a reduction
            may_wait = is_over or (self._passes.expects_no_gather and not self._layers.may_communicate())
            oldest = self._in_flight[0] if may_wait else None
            # A late reduction of another group must not delay those of this group.
            requested = itertools.islice(self._in_flight, 1 if self._in_one_order else None)
            ready = oldest or next((one for one in requested if one.will_arrive()), None)
            if ready is None:
                ready = self._wait_for_device(position)
            if ready is None:
                break
            self._in_flight.remove(ready)
            self._finish(ready)
        self.buckets[position].start_reduction(as_sum=position in self._local_sums)
        self._in_flight.append(self.buckets[position])
        self._offer(position)  # in a group of one it is complete

    def _wait_for_device(self, position: int) -> GradientBucket | None:
        """Returns the oldest reduction once the device has finished it.

        None if it has not in time, or few are in flight.

        The host may be far ahead of its device, and every packed buffer stays allocated until its reduction ends. The
        host waits, not the stream: if a peer holds the bucket back, the transfer ends only after gathers that this rank
        has yet to issue, so a waiting stream would deadlock.
        """
        backward = self._opened
        if not backward.is_patient:
            return None
        numels = [gradients.bucket.layout.numel for gradients in (*self._in_flight, self.buckets[position])]
        largest = max(*numels, min(_SMALL, self._largest))
        if sum(numels) <= _MAX_IN_FLIGHT * largest and len(numels) <= _MOST_SMALL:
            return None
        oldest = self._in_flight[0]
        is_finished = oldest.poll(_PATIENCE)
        if is_finished:
            return oldest
        if is_finished is False:
            backward.is_patient = False
            log_dist(
                f"the reduction of the gradients of {oldest.bucket.label} has not ended for {_PATIENCE:g} s: another "
                "rank is late, or has not used some of these parameters. This backward continues without waiting, and "
                "needs more memory. Set zero_optimization.overlap_comm to false if ranks use different parameters",
                ranks=[-1],
                level=logging.WARNING,
            )
        return None

    def end(self, now: Pass) -> None:
        """Reduces the remaining buckets of the backward in the agreed order, and waits for every reduction."""
        backward = self._opened
        reaches, reduces = backward.reaches, backward.reduces
        reduced: Sequence[int] = ()
        if reduces:
            reduced = backward.order if backward.order is not None else sorted(reduces, reverse=True)
        for turn, position in enumerate(reduced):
            if position not in backward.packed:
                self.buckets[position].note_unannounced()
                self._pack(position, backward)
            if turn >= backward.cursor:  # immediately, so that few packed buffers are alive together
                self._send(position, is_over=True)
        for position in reaches:
            if position not in reduces and position not in backward.packed:
                self.buckets[position].note_unannounced()
                if self.buckets[position].has_arrivals:
                    self._pack(position, backward)
        self._drain()
        if reduces and self._combines:
            self._has_partial_sums = True
        if backward.combines:
            self._combine(reduced)
        now.reductions = None
        self._local_sums.update(reaches)
        self._local_sums -= reduces
        if backward.order is None and reduces:
            self._orders[reduces] = self._agree_on_order(backward)
            self._known |= reduces
        self.program.show()

    def _combine(self, order: Sequence[int]) -> None:
        """Runs the second step of all sums, sending one while it waits for the one before."""
        before: GradientBucket | None = None
        for position in order:
            self.buckets[position].start_combining()
            if before is not None:
                before.finish_combining()
            before = self.buckets[position]
        if before is not None:
            before.finish_combining()
        self._has_partial_sums = False
        for position in order:
            self._offer(position)

    def _drain(self) -> None:
        while self._in_flight:
            self._finish(self._in_flight.popleft())

    def _finish(self, gradients: GradientBucket) -> None:
        gradients.finish_reduction()
        if self._reader is not None:
            self._reader.offer(self._positions[gradients])

    def _agree_on_order(self, backward: ReductionState) -> list[int]:
        """Returns rank 0's order of completion, the incomplete buckets and those with repeated arrivals last."""
        held_back = [p for p in sorted(backward.reduces) if p not in backward.completed or self.buckets[p].repeats]
        own_order = [p for p in backward.completed if p in backward.reduces and p not in held_back] + held_back
        if not own_order:
            return own_order
        rows = self._peers.gather_small(
            torch.tensor(own_order, dtype=torch.int64), channel="step", label="the order of the first reductions"
        )
        return [int(position) for position in rows[0].tolist()]

    @property
    def _opened(self) -> ReductionState:
        backward = self._passes.reductions
        assert backward is not None
        return backward

    @property
    def is_open(self) -> bool:
        """Returns whether a backward is open."""
        return self._passes.reductions is not None

    @property
    def is_reducing(self) -> bool:
        """Returns whether a backward is open that other ranks reduce with this one."""
        backward = self._passes.reductions
        return backward is not None and bool(backward.reduces)

    @property
    def has_sums(self) -> bool:
        """Returns whether gradients of earlier backwards wait for an update on this rank."""
        self.program.apply()
        return any(not gradients.sum.is_empty for gradients in self.buckets)

    @property
    def has_arrivals(self) -> bool:
        """Returns whether autograd delivered any gradient in the latest backward."""
        return any(gradients.has_arrivals for gradients in self.buckets)

    @property
    def is_mixed(self) -> bool:
        """Returns whether a part of the open backward has been added to sums of earlier micro-batches."""
        backward = self._opened
        return any(self.buckets[p].is_mixed(reduced=p in backward.reduces) for p in backward.reaches)

    def drop(self, now: Pass, *, with_sums: bool) -> None:
        """Discards what a backward has delivered, after an exception in it.

        All ranks together drop a backward that reduces; one that does not is dropped by this rank alone, since only its
        own sums are involved.

        Args:
            with_sums: Throw away what earlier micro-batches of this update left, because a part of this backward has
                been added to it (:attr:`is_mixed`, on any rank) and cannot be taken out again.
        """
        backward = self._opened
        self._drain()
        self.stop_reading()
        if with_sums:
            log_dist(
                "gradients of the failed backward were already added to those of earlier micro-batches, so "
                f"{'the sum' if backward.reduces else 'the sum of this rank'} of this update starts again from zero",
                ranks=None if backward.reduces else [-1],
                level=logging.WARNING,
            )
        for position in backward.reaches:
            self.buckets[position].drop_backward(reduced=position in backward.reduces, with_sum=with_sums)
        if backward.reduces:
            self._has_partial_sums = any(gradients.sum.partial is not None for gradients in self.buckets)
            if with_sums:
                self._local_sums -= backward.reduces
        # In the other buckets, ranks on which this backward succeeded have sums.
        self._local_sums.update(position for position in backward.reaches if position not in backward.reduces)
        now.reductions = None
        self.program.show()

    def end_micro_step(self) -> None:
        """Called when a micro-step without an update ends: ranks may hold its sums even if this one ran no backward."""
        if not self.policy.every_micro_batch:
            self._local_sums.update(range(len(self.buckets)))

    def note_uneven(self) -> None:
        """Called on every rank when some ranks lack a gradient that others have.

        Such a rank sends the bucket only at the end of its backward, while others send theirs between two gathers.
        """
        if self._needs_one_order and self._overlaps:
            self._overlaps = False
            log_dist(
                "some parameters are used on some ranks only: from now on gradients are reduced at the end of each "
                "backward, so that all ranks issue gathers and reductions in one order"
            )

    # -- the update's side -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Reduces sums that no boundary has reduced yet (the optimizer's own ``step``, ``no_sync`` until the end).

        Gradients that were put into ``.grad`` since the last backward are such sums too.
        """
        self.program.apply()
        self.program.give_additions()
        unannounced = [gradients for gradients in self.buckets if gradients.holds_unannounced]
        if unannounced or self._local_sums:  # buckets with a partial sum are not read
            self.stop_reading()
        for gradients in unannounced:
            gradients.begin_backward(is_last=True)
            gradients.note_unannounced()
            gradients.keep()
        if self.keeps_own:
            self._local_sums.clear()
            return
        if self._local_sums or unannounced:
            self._reduce_local_sums()
        if self._has_partial_sums:
            self._combine(range(len(self.buckets)))
        if unannounced:
            self.program.show()

    def _reduce_local_sums(self) -> None:
        self._has_partial_sums = self._combines
        has_sum = [gradients.sum.local is not None for gradients in self.buckets]
        rows = self._peers.gather_small(
            torch.tensor(has_sum, dtype=torch.int64), channel="call", label="the reduction of accumulated gradients"
        )
        pending = torch.nonzero(rows.sum(dim=0)).view(-1).tolist()
        for position in pending:
            gradients = self.buckets[position]
            if gradients.sum.local is None:
                gradients.pack()
            self._send(position, is_over=True)
        self._drain()
        self._local_sums.clear()

    def scale_feedback(self, factor: float) -> None:
        """Scales the error-feedback residuals when the unit of gradients changes, as it does with the loss scale."""
        for gradients in self.buckets:
            gradients.scale_feedback(factor)

    def begin_update(self, before: int) -> None:
        """Sets for the next update whether gradients are sent with the codecs of their groups.

        Args:
            before: Updates so far, skipped ones included; equal on all ranks, also after a checkpoint was loaded.
        """
        is_coded, why = before >= self.policy.codes_from, ""
        if is_coded and self._trial is not None and self._has_codecs:
            is_coded = self._trial.next(self._peers)
            if not self._trial.outcome:
                self._set_coded(is_coded)
                return
            why = f": {self._trial.outcome}"
            self._trial = None
            if not is_coded:
                self.scale_feedback(0.0)
        elif is_coded is self.is_coded or (self.policy.is_trial and self._trial is None):
            return
        self._set_coded(is_coded)
        if self._has_codecs:
            way = "as codes" if is_coded else "uncompressed"
            log_dist(f"update {before + 1}: gradients are sent {way} from now on{why}")

    def _set_coded(self, is_coded: bool) -> None:
        self.is_coded = is_coded
        for gradients in self.buckets:
            gradients.is_coded = is_coded

    @property
    def _has_codecs(self) -> bool:
        return any(not gradients.bucket.group.gradient_transport.is_exact for gradients in self.buckets)

    def commit(self) -> None:
        """Called when the update is applied: what reductions lost of its gradients is added to the next ones."""
        for gradients in self.buckets:
            gradients.commit()

    def end_update(self, number: int) -> None:
        """Called when an update is over, or was skipped."""
        if self.policy.forget_every and number % self.policy.forget_every == 0:
            self.scale_feedback(0.0)

    def zero_grad(self) -> None:
        """Discards every gradient, including those that are only in ``.grad``."""
        self.clear()
        for gradients in self.buckets:
            for parameter in gradients.bucket.params:
                parameter.grad = None

    def clear(self) -> None:
        """Frees all gradients."""
        self.discards += 1
        self.program.clear()
        self.stop_reading()
        self._local_sums.clear()
        self._has_partial_sums = False
        for gradients in self.buckets:
            gradients.clear()
