"""The gradients of one bucket, from the parameters' ``.grad`` to the reduced gradient that the update reads.

Per backward a trainable bucket goes ``IDLE -> FILLING -> REDUCING -> REDUCED`` (or back to ``IDLE`` where the local sum
took it). Autograd's own ``.grad`` holds each gradient until the last one of the bucket has arrived; one fused copy then
packs them into the flat buffer, or adds them to the local sum where nothing is reduced yet, and ``.grad`` is dropped.
Sums of earlier backwards are in ``zero.gradient.gradient_sum``.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import Enum

import torch

from deepspeed.comm.base.zero_rows import ZeroRows, row_starts
from deepspeed.comm.transports.transport import LocalTransport, Reduction, Work, poll, transfer_key
from deepspeed.errors import CallOrderError, require_state
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.gradient.error_feedback import ErrorFeedback
from deepspeed.zero.gradient.gradient_sum import GradientDestination, GradientSum, pack_and_square, squared_norm
from deepspeed.zero.gradient.pending_gradient import holds_values
from deepspeed.zero.gradient.reduction_policy import ReductionPolicy
from deepspeed.zero.ranges import in_profile
from deepspeed.zero.storage import FlatBuffer, MemoryTracker, StorageKind

_REDUCTION = 1  # kind of transfer, see transfer_key


class GradientState(Enum):
    """Tracks where the gradients of a bucket are in the present backward."""

    IDLE = "idle"
    FILLING = "filling"
    REDUCING = "reducing"
    REDUCED = "reduced"


@dataclass(frozen=True)
class _Transfer:
    """A reduction in flight."""

    work: Work  # the transfer
    source: FlatBuffer  # what is sent
    incoming: FlatBuffer  # where the sum arrives


class GradientBucket:
    """The gradients of one trainable bucket."""

    def __init__(
        self,
        bucket: Bucket,
        policy: ReductionPolicy,
        memory_tracker: MemoryTracker,
        destination: GradientDestination,
    ) -> None:
        self.bucket = bucket  # the bucket of parameters
        self._group = group = bucket.group
        self._prescale, self._postscale = policy.factors(group.divisor)
        self._destination = destination
        self.state = GradientState.IDLE  # where the gradients of this backward are
        # parameters whose whole gradient a program has set since the last update: all ranks must set the same
        self.writes: set[int] = set()
        self._policy = policy
        self.is_coded = policy.begins_coded  # reductions use ``reduce_codec`` of their group; otherwise ``early_codec``
        # a group of one: nothing is reduced
        self.is_local = isinstance(group.reduce, LocalTransport) and group.combine is None
        # whether the update reads this rank's own sum as it is
        self.is_own_result = self.is_local and self._postscale * self._prescale == 1.0
        layout = bucket.layout
        self._flat = FlatBuffer(
            layout.numel,
            policy.reduce_dtype(bucket.dtype),
            bucket.device,
            kind=StorageKind.GRADIENT_BUCKET,
            memory_tracker=memory_tracker,
        )
        shapes = [tile.shape for tile in layout.tiles]
        self._views = self._flat.views(layout.starts, shapes)
        self._gaps = self._padding()
        self._flat.free()
        self._arrived = [False] * len(bucket.params)
        self._missing = len(bucket.params)
        self._transfer: _Transfer | None = None
        self._rounds = 0
        # Sums over ranks are fp32, and fp64 where the gradient is.
        is_double = bucket.dtype == torch.float64
        self._sum_dtype = torch.float64 if is_double else torch.float32
        accumulate_dtype = policy.accumulate_dtype
        if policy.narrows:  # modules that stay fp32 have fp32 masters and keep fp32 gradients
            accumulate_dtype = torch.promote_types(accumulate_dtype, bucket.dtype)
        # the sums of this backward and earlier ones since the last update
        self.sum = GradientSum(
            self._flat,
            layout.starts,
            shapes,
            dtype=torch.float64 if is_double else accumulate_dtype,
            device=bucket.device,
            destination=destination,
            memory_tracker=memory_tracker,
        )
        self._before = self.sum.mark()
        self.repeats = False  # whether gradients arrive more than once in a backward
        codec = group.reduce_codec
        self._rows: ZeroRows | None = None
        self._combine_rows: ZeroRows | None = None
        if not self.is_local and (group.reduces_rows or (codec is not None and not codec.encodes_zero)):
            self._open_rows()
        # the error feedback of reductions; None without a lossy codec or without error feedback
        self.feedback: ErrorFeedback | None = None
        if group.feeds_back:
            self.feedback = ErrorFeedback(
                layout,
                bucket.device,
                memory_tracker,
                to_owner=policy.to_owner,
                spread=group.is_spread,
                may_skip=policy.may_skip,
            )

    def _open_rows(self) -> None:
        """Returns the rows of the bucket and, where sums of slices are sent too, those of this rank's slice."""
        layout, device = self.bucket.layout, self.bucket.device
        starts = row_starts(layout.starts, [tile.shape for tile in layout.tiles], layout.numel)
        self._rows = ZeroRows(starts, layout.numel, layout.num_slices, device)
        if layout.replicas > 1:
            begin = self._group.gather.rank * layout.slice_numel
            within = [start - begin for start in starts]
            self._combine_rows = ZeroRows(within, layout.slice_numel, layout.replicas, device)

    def _padding(self) -> list[torch.Tensor]:
        """Returns the views of the gaps between tiles."""
        layout = self.bucket.layout
        ends = (*layout.starts[1:], layout.numel)
        gaps = [
            self._flat.tensor[start + tile.numel : end]
            for tile, start, end in zip(layout.tiles, layout.starts, ends, strict=True)
        ]
        return [gap for gap in gaps if gap.numel()]

    # -- filling -----------------------------------------------------------------------------------------------------

    def arrive(self, index: int) -> bool:
        """Records that a gradient has arrived; returns whether the bucket is now complete for this backward.

        Raises:
            CallOrderError: The bucket was reduced already in this backward.
        """
        if self._arrived[index]:
            self.repeats = True
            if self.state is not GradientState.FILLING:
                raise CallOrderError(
                    f"the gradient of {self.bucket.layout.tiles[index].name!r} arrived again after its bucket was "
                    "reduced: the model reuses this parameter in this backward but did not in the first one. Keep the "
                    "graph alike from step to step, or set zero_optimization.overlap_comm to false"
                )
            return False
        if self.state is not GradientState.FILLING:
            self.state = GradientState.FILLING
        self._arrived[index] = True
        self._missing -= 1
        return self._missing == 0

    def note_unannounced(self) -> None:
        """Counts gradients that no hook announced: weight steps of schedules set ``.grad`` by ``autograd.grad``."""
        if self._missing == 0:
            return
        for index, parameter in enumerate(self.bucket.params):
            if not self._arrived[index] and holds_values(parameter) and parameter.requires_grad:
                self.arrive(index)

    @property
    def holds_unannounced(self) -> bool:
        """Whether, between backwards, a parameter has a gradient that was never collected."""
        return any(holds_values(parameter) and parameter.requires_grad for parameter in self.bucket.params)

    @in_profile("pack")
    def pack(self) -> None:
        """Copies the gradients into the flat buffer and drops ``.grad``; absent ones count as zero."""
        grads: dict[int, torch.Tensor] = {}
        zeros = list(self._gaps)
        self.sum.leave_packed()
        self._flat.allocate()
        for index, parameter in enumerate(self.bucket.params):
            grad = parameter.grad if self._arrived[index] else None
            if grad is None:
                zeros.append(self._views[index])
                continue
            self.sum.used[index] = True
            grads[index] = grad.to_dense() if grad.layout is not torch.strided else grad
            parameter.grad = None
        self.sum.squares = None  # they belong to the result that may have been in the buffer
        with torch.no_grad():
            if zeros:
                torch._foreach_zero_(zeros)
            # whether the update reads what is packed now: in a group of one without earlier micro-batches
            is_result = self.is_own_result and self.sum.reduced is None and self.sum.local is None
            squares = self.sum.fresh_squares(wanted=is_result)
            if squares is not None:
                pack_and_square(self.bucket.layout, self._flat.tensor, self._views, grads, squares)
            elif grads:
                torch._foreach_copy_([self._views[index] for index in grads], list(grads.values()))
        self.bucket.gradients_in = True

    @in_profile("keep")
    def keep(self) -> None:
        """Adds the gradients to this rank's own sum over micro-batches and drops ``.grad``.

        They are packed first only where their dtype is another than that of what is packed, or where the squares of the
        sum are to be taken with it.
        """
        grads: dict[int, torch.Tensor] = {}
        for index, parameter in enumerate(self.bucket.params):
            if self._arrived[index] and parameter.grad is not None:
                grads[index] = parameter.grad
        dtype = self._flat.tensor.dtype
        takes_squares = self.sum.takes_squares and self.is_local  # otherwise they are taken of the sum over ranks
        if takes_squares or any(g.dtype != dtype or g.layout is not torch.strided for g in grads.values()):
            self.pack()
            self.accumulate_locally()
            return
        self.sum.add_apart(grads)
        for index in grads:
            self.sum.used[index] = True
            self.bucket.params[index].grad = None
        self.bucket.gradients_in = True
        self.state = GradientState.IDLE

    @property
    def had_sum(self) -> bool:
        """Returns whether there was a sum when this backward began."""
        return not self._before.is_empty

    @property
    def has_arrivals(self) -> bool:
        """Returns whether any gradient arrived in this backward."""
        return any(self._arrived)

    def begin_backward(self, *, is_last: bool = False) -> None:
        """Clears the arrivals of the last backward, and checks which parameters are frozen now.

        Args:
            is_last: Whether the update follows, so that squares are computed while this backward's gradients are in
                cache.
        """
        self.sum.takes_squares = is_last
        self._arrived = [False] * len(self._arrived)
        self._missing = sum(parameter.requires_grad for parameter in self.bucket.params)
        self.bucket.gradients_in = self._missing == 0
        self.state = GradientState.IDLE
        self._before = self.sum.mark()

    def is_mixed(self, *, reduced: bool) -> bool:
        """Returns whether this backward's gradient has been added to a sum that was there before it."""
        return self.sum.is_mixed_since(self._before, reduced=reduced)

    def drop_backward(self, *, reduced: bool, with_sum: bool) -> None:
        """Discards what a backward delivered, after an exception in it."""
        for parameter in self.bucket.params:
            parameter.grad = None
        if reduced and (with_sum or (self._before.is_empty and self.sum.has_grown_since(self._before))):
            self.clear()
            return
        self.sum.undo_local(self._before, with_sum=with_sum)
        if not self.sum.is_packed:
            self._flat.free()
        self.begin_backward()

    # -- accumulating and reducing -----------------------------------------------------------------------------------

    def accumulate_locally(self) -> None:
        """Adds the packed gradient to this rank's own sum over micro-batches, over the whole bucket."""
        self.sum.add_local(is_result=self.is_local)
        self.state = GradientState.IDLE

    @in_profile("reduce")
    def start_reduction(self, *, as_sum: bool) -> None:
        """FILLING (packed) or an unreduced sum -> REDUCING.

        Args:
            as_sum: Some rank may have a sum of earlier micro-batches; then what is sent has the dtype of sums on every
                rank, also on one that has none in this bucket. Equal on all ranks.
        """
        self.sum.begin_addition()  # counted at the start, since ranks must agree: the end depends on the peers
        if as_sum and self.sum.local is None and not self.is_local:
            self.accumulate_locally()
        source = self._flat if self.sum.local is None else self._take_local_sum()
        self.state = GradientState.REDUCING
        if self.is_local:
            if self._postscale * self._prescale != 1.0:
                source.tensor.mul_(self._postscale * self._prescale)
                self.sum.squares = None
            self.sum.add_reduced(source)  # the result of a group of one; further backwards are added to it
            return
        if self._prescale != 1.0:
            source.tensor.mul_(self._prescale)
        layout = self.bucket.layout
        numel = layout.slice_numel if self._policy.to_owner else layout.numel
        incoming = self.sum.new_buffer(numel, self._sum_dtype, self._destination.incoming_tier)
        self._rounds += 1
        feedback = self.feedback if self.is_coded else None
        if feedback is not None:
            feedback.begin_reduction()
        transport = self._group.gradient_transport if self.is_coded else self._group.early_gradient_transport
        reduce = transport.reduce_scatter if self._policy.to_owner else transport.all_reduce
        is_result = self.sum.reduced is None and not self._narrows and self._group.combine is None
        squares = self.sum.fresh_squares(wanted=is_result)
        work = reduce(
            source.tensor,
            incoming.tensor,
            Reduction(
                scale=self._postscale if self._group.combine is None else 1.0,
                key=transfer_key(self._group.reduce.owner, self.bucket.index, _REDUCTION, self._rounds),
                label=f"the reduction of the gradients of {self.bucket.label}",
                limit=self._policy.bucket_numel,
                visit=None if squares is None else squares.add,
                error=None if feedback is None else feedback.reduction,
                rows=self._rows if self.is_coded or self._group.reduces_rows else None,
            ),
        )
        self._transfer = _Transfer(work, source, incoming)

    def _take_local_sum(self) -> FlatBuffer:
        """Returns the local sum, with a packed micro-batch added to it, in the dtype that is sent.

        It is sent once for many micro-batches, so it is sent in the dtype of the sum, unless the configuration sets a
        dtype for communication.
        """
        if self.state is GradientState.FILLING:
            self.accumulate_locally()
        total = self.sum.take_local()
        if self.is_local or not self._policy.reduces_sums_narrow:
            return total
        if total.tensor.dtype == self._flat.tensor.dtype:
            return total
        self._flat.allocate()
        self._flat.tensor.copy_(total.tensor)
        total.free()
        return self._flat

    def will_arrive(self) -> bool:
        """Returns whether the reduction can be finished without a further call of this rank."""
        return self._transfer is None or self._transfer.work.will_arrive()

    def poll(self, seconds: float) -> bool | None:
        """Blocks the host until the device has finished the reduction; see ``comm.transports.transport.poll``."""
        return True if self._transfer is None else poll(self._transfer.work, seconds)

    @in_profile("wait for reduction")
    def finish_reduction(self) -> None:
        """REDUCING -> REDUCED: waits and adds the reduced gradient to what earlier backwards left."""
        if self.state is not GradientState.REDUCING:
            return
        if self._transfer is not None:
            incoming = self._receive()
            if self._group.combine is None:
                self.sum.add_reduced(incoming, narrows=self._narrows)
            else:
                self.sum.add_partial(incoming)
        self.state = GradientState.REDUCED

    def _receive(self) -> FlatBuffer:
        """Waits for the transfer, frees the sent buffer, and returns the received one."""
        assert self._transfer is not None
        transfer, self._transfer = self._transfer, None
        transfer.work.wait()
        transfer.source.free()
        return transfer.incoming

    @in_profile("combine")
    def start_combining(self) -> None:
        """Starts the sum over the ranks with the same slice; does nothing without a partial sum."""
        if self.sum.partial is None:
            return
        transport = self._group.combine_transport if self.is_coded else self._group.early_combine_transport
        to_owner = self._group.is_spread
        assert transport is not None
        require_state(self._transfer is None, self.bucket, "no other transfer of its gradients")
        feedback = self.feedback if self.is_coded else None
        partial = self.sum.take_partial()
        numel = partial.tensor.numel() // (transport.size if to_owner else 1)
        incoming = self.sum.new_buffer(numel, self._sum_dtype, self._destination.incoming_tier)
        self._rounds += 1
        # its number among ranks with the same slices; on other pipeline stages buckets are numbered differently
        layout = self.bucket.layout
        number = zlib.crc32(layout.tiles[0].logical.encode()) if self._group.spans_stages else layout.index
        combine = transport.reduce_scatter if to_owner else transport.all_reduce
        work = combine(
            partial.tensor,
            incoming.tensor,
            Reduction(
                scale=self._postscale,
                key=transfer_key(transport.owner, number, _REDUCTION, self._rounds),
                label=f"the sum of the gradients of {self.bucket.label} over all groups",
                limit=self._policy.bucket_numel,
                error=None if feedback is None else feedback.combination,
                rows=self._combine_rows if self.is_coded else None,
            ),
        )
        self._transfer = _Transfer(work, partial, incoming)

    @in_profile("wait for combination")
    def finish_combining(self) -> None:
        """Waits for :meth:`start_combining`."""
        if self._transfer is not None:
            self.sum.add_reduced(self._receive(), narrows=self._narrows)

    @property
    def _narrows(self) -> bool:
        """Returns whether sums over ranks are rounded to the dtype of sums over micro-batches."""
        return self.sum.dtype != self._sum_dtype and (self._policy.every_micro_batch or self._policy.narrows)

    # -- for updates that do not exchange gradients ------------------------------------------------------------------

    def first_not_finite(self) -> int | None:
        """Returns the index of the first tile whose sum on this rank is not finite, or None."""
        if self.sum.local is not None:
            for index, (tile, start) in enumerate(
                zip(self.bucket.layout.tiles, self.bucket.layout.starts, strict=True)
            ):
                if not bool(torch.isfinite(self.sum.local.tensor[start : start + tile.numel]).all()):
                    return index
        return None

    def take_own_sum(self) -> tuple[FlatBuffer | None, float]:
        """Returns ``(own, factor)`` and clears the sum.

        ``own`` (1-D, as long as the bucket) is the unreduced sum of this rank's micro-batches, or None without any.
        ``factor`` times the mean of ``own`` over the ranks is what a reduction would have given. Where other pipeline
        stages have the parameters too (tied weights), ``own`` is summed with theirs first, which is a collective.
        """
        group, factor = self._group, self._prescale * self._group.reduce.size
        own = None if self.sum.local is None else self.sum.take_local()
        if not group.spans_stages:
            return own, factor * self._postscale
        if own is None:
            own = self.sum.new_buffer(self.bucket.layout.numel, self.sum.dtype)
            own.tensor.zero_()
        self.sum.add_partial(own)
        self.start_combining()
        self.finish_combining()
        combined, self.sum.reduced = self.sum.reduced, None
        return combined, factor

    def new_result(self, numel: int) -> FlatBuffer:
        """Returns zeros for what the update reads in the place of a gradient: fp32, aligned with the master."""
        made = self.sum.new_buffer(numel, torch.float32, self._destination.incoming_tier)
        made.tensor.zero_()
        return made

    # -- the update's side -------------------------------------------------------------------------------------------

    @property
    def result(self) -> torch.Tensor | None:
        """The gradient that the update reads, or None: 1-D, aligned with the owner's slice or with the whole bucket."""
        return self.sum.read()

    @property
    def used(self) -> list[bool]:
        """Per parameter, whether a gradient arrived since the last update."""
        return self.sum.used

    @property
    def is_final(self) -> bool:
        """Returns whether :attr:`result` is what the update will read, unless a program changes it."""
        is_alone = self.sum.local is None and self.sum.partial is None and self._transfer is None
        return self.sum.takes_squares and self.sum.reduced is not None and is_alone

    def sum_of_squares(self) -> torch.Tensor | None:
        """Returns the sum of squares of the accumulated gradient, 0-dim fp64 on its device; None without one.

        That is the reduced gradient or, where gradients are not reduced, this rank's own sum over micro-batches.
        """
        if self.sum.reduced is None and self.sum.local is not None:
            return squared_norm(self.sum.local.tensor)
        return self.sum.of_squares()

    def note_write(self, tile: int, *, by_all: bool) -> None:
        """Records that a program has set the gradient of a parameter, which may have had none.

        Args:
            by_all: Every rank keeps the whole gradient, so every rank must set it.
        """
        self.sum.squares = None
        self.sum.used[tile] = True
        if by_all:
            self.writes.add(tile)

    def scale_feedback(self, factor: float) -> None:
        """Multiplies the error feedback by ``factor``, as the unit of gradients changes with the loss scale."""
        if self.feedback is not None:
            self.feedback.scale(factor)

    def commit(self) -> None:
        """Called when the update is applied: what its reductions lost stays lost until the next one."""
        if self.feedback is not None:
            self.feedback.commit()

    def free_idle_buffer(self) -> None:
        """Frees the packed buffer, which a group of one keeps allocated between steps."""
        if not self.sum.is_packed:
            self._flat.free()

    def discard_sums(self) -> None:
        """Discards the sums of all parameters, without a change of what this rank does in the next reductions."""
        if self.feedback is not None:
            self.feedback.restore()
        self.sum.discard()

    def clear(self) -> None:
        """Frees every gradient of the bucket, after the update or on ``zero_grad``.

        In a group of one the packed buffers are the gradients and all live together at every step. They stay allocated
        in between, because freeing them would cost a page fault per 4 KiB in each backward.
        """
        if not (self.is_local and self.sum.is_packed):
            self._flat.free()
        if self.feedback is not None:
            self.feedback.restore()
        self.writes.clear()
        self.sum.clear()
        self.begin_backward()
