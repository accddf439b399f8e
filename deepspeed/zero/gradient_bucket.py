"""The gradients of one bucket, from the parameters' ``.grad`` to the reduced gradient that the update reads.

Per backward a trainable bucket goes ``IDLE -> FILLING -> REDUCING -> REDUCED`` (or back to ``IDLE`` where a local
accumulator took the sum). Autograd's own ``.grad`` holds each gradient until the last one of the bucket has arrived;
one fused copy then packs them into the flat buffer and ``.grad`` is dropped.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import Enum

import torch

from deepspeed.comm.transport import LocalTransport, Reduction, Work, transfer_key
from deepspeed.errors import CallOrderError
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.landing import Landing, add_into
from deepspeed.zero.norm import Squares, squared_norm
from deepspeed.zero.packing import pack_and_square
from deepspeed.zero.placement import Home
from deepspeed.zero.reduction_policy import ReductionPolicy
from deepspeed.zero.storage import FlatBuffer, Kind, Ledger

_REDUCTION = 1  # kind of transfer, see transfer_key


class GradientState(Enum):
    """Where the gradients of a bucket are in the present backward."""

    IDLE = "idle"
    FILLING = "filling"
    REDUCING = "reducing"
    REDUCED = "reduced"


class GradientBucket:
    """The gradients of one trainable bucket.

    Attributes:
        bucket: Whose gradients.
        result: What the update reads, or None: 1-D, aligned with the owner's slice where gradients go to the owner,
            else with the whole bucket.
        used: Per parameter, whether a gradient arrived since the last update.
    """

    def __init__(
        self,
        bucket: Bucket,
        policy: ReductionPolicy,
        ledger: Ledger,
        landing: Landing,
    ) -> None:
        self.bucket = bucket
        self._group = group = bucket.group
        self._before, self._after = policy.factors(group.divisor)
        self._partial: FlatBuffer | None = None
        self._landing = landing
        self.state = GradientState.IDLE
        self._policy = policy
        self._transport = group.reduce
        self._ledger = ledger
        self._is_local = isinstance(group.reduce, LocalTransport)
        layout = bucket.layout
        self._flat = FlatBuffer(
            layout.numel,
            policy.reduce_dtype(bucket.dtype),
            bucket.device,
            kind=Kind.GRADIENT_BUCKET,
            ledger=ledger,
        )
        self._views = self._flat.views(layout.starts, [tile.shape for tile in layout.tiles])
        self._gaps = self._padding()
        self._flat.free()
        self._arrived = [False] * len(bucket.params)
        self._missing = len(bucket.params)
        self.used = [False] * len(bucket.params)
        self._accumulator: FlatBuffer | None = None
        self._result: FlatBuffer | None = None
        self._incoming: FlatBuffer | None = None
        self._source: FlatBuffer = self._flat
        self._work: Work | None = None
        self._rounds = 0
        self._squares: Squares | None = None  # of the result, where they were taken as it was made
        self._is_last = False
        self._had_sum = self._had_local_sum = self._added = False
        # Sums over ranks are fp32, and fp64 where the gradient is.
        is_double = bucket.dtype == torch.float64
        self._sum_dtype = torch.float64 if is_double else torch.float32
        self._accumulate_dtype = torch.float64 if is_double else policy.accumulate_dtype
        self._used_before = list(self.used)
        self.repeats = False

    def _padding(self) -> list[torch.Tensor]:
        """Views of the stretches between tiles."""
        layout = self.bucket.layout
        ends = (*layout.starts[1:], layout.numel)
        gaps = [
            self._flat.tensor[start + tile.numel : end]
            for tile, start, end in zip(layout.tiles, layout.starts, ends, strict=True)
        ]
        return [gap for gap in gaps if gap.numel()]

    # -- filling -----------------------------------------------------------------------------------------------------

    def arrive(self, index: int) -> bool:
        """Notes that autograd has delivered the gradient of parameter ``index``.

        Returns:
            Whether the bucket is now complete for this backward.
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
            if not self._arrived[index] and parameter.grad is not None and parameter.requires_grad:
                self.arrive(index)

    @property
    def holds_unannounced(self) -> bool:
        """Whether, between backwards, a parameter has a gradient that was never collected."""
        return any(parameter.grad is not None and parameter.requires_grad for parameter in self.bucket.params)

    def pack(self) -> None:
        """Copies the gradients into the flat buffer and drops ``.grad``; absent ones count as zero."""
        grads: dict[int, torch.Tensor] = {}
        zeros = list(self._gaps)
        self._move_result_out_of_flat()
        self._flat.grow()
        for index, parameter in enumerate(self.bucket.params):
            grad = parameter.grad if self._arrived[index] else None
            if grad is None:
                zeros.append(self._views[index])
                continue
            self.used[index] = True
            grads[index] = grad.to_dense() if grad.layout is not torch.strided else grad
            parameter.grad = None
        self._squares = None  # of the result that may have been in the buffer
        with torch.no_grad():
            if zeros:
                torch._foreach_zero_(zeros)
            if self._is_last and self._will_be_result:
                self._squares = Squares(self.bucket.device)
                pack_and_square(self.bucket.layout, self._flat.tensor, self._views, grads, self._squares)
            elif grads:
                torch._foreach_copy_([self._views[index] for index in grads], list(grads.values()))
        self.bucket.gradients_in = True

    @property
    def _will_be_result(self) -> bool:
        """Whether what is packed now is what the update reads: a group of one without earlier micro-batches."""
        factor = self._after * self._before
        return self._is_local and self._result is None and self._accumulator is None and factor == 1.0

    @property
    def has_arrivals(self) -> bool:
        """Whether any gradient arrived in this backward."""
        return any(self._arrived)

    def begin_backward(self, *, is_last: bool = False) -> None:
        """Forgets the arrivals of the last backward, and looks which parameters are frozen now.

        Args:
            is_last: The update follows, so that the squares of what this backward leaves are worth taking.
        """
        self._is_last = is_last
        self._arrived = [False] * len(self._arrived)
        self._missing = sum(parameter.requires_grad for parameter in self.bucket.params)
        self.bucket.gradients_in = self._missing == 0
        self.state = GradientState.IDLE
        self._had_sum = self.has_sum
        self._had_local_sum = self._accumulator is not None
        self._added = False
        self._used_before = list(self.used)

    @property
    def has_sum(self) -> bool:
        """Whether a sum of earlier backwards is there, reduced or not."""
        return any(buffer is not None for buffer in (self._result, self._accumulator, self._partial))

    def is_mixed(self, *, reduced: bool) -> bool:
        """Whether this backward's gradient has been added to a sum that was there before it.

        Args:
            reduced: The backward was one that reduces; the others touch nothing but this rank's own sum.
        """
        return self._added and (self._had_sum if reduced else self._had_local_sum)

    def drop_backward(self, *, reduced: bool, with_sum: bool) -> None:
        """After an exception in backward: throws away what it delivered.

        Args:
            reduced: As of :meth:`is_mixed`.
            with_sum: Throw away the sum of earlier micro-batches that it was to be added to.
        """
        for parameter in self.bucket.params:
            parameter.grad = None
        if reduced and (with_sum or (self._added and not self._had_sum)):
            self.clear()
            return
        if self._accumulator is not None and (with_sum or not self._had_local_sum):
            self._accumulator.free()
            self._accumulator = None
        if self._result is not self._flat:
            self._flat.free()
        is_empty = self._result is None and self._accumulator is None and self._partial is None
        self.used = [False] * len(self.used) if is_empty else list(self._used_before)
        self.begin_backward()

    # -- accumulating and reducing -----------------------------------------------------------------------------------

    def accumulate_locally(self) -> None:
        """Adds the packed gradient to this rank's own sum over micro-batches, over the whole bucket."""
        self._added = True
        if self._accumulator is None:
            self._accumulator = self._new_buffer(self.bucket.layout.numel, self._accumulate_dtype)
            self._accumulator.tensor.copy_(self._flat.tensor)
        else:
            # In a group of one the sum is the result.
            self._squares = Squares(self.bucket.device) if self._is_last and self._is_local else None
            add_into(self._accumulator.tensor, self._flat.tensor, self._squares)
        self._flat.free()
        self.state = GradientState.IDLE

    @property
    def has_unreduced_sum(self) -> bool:
        """Whether gradients of this rank wait for a reduction that has not been started."""
        return self._accumulator is not None

    def start_reduction(self, *, as_sum: bool) -> None:
        """FILLING (packed) or an unreduced sum -> REDUCING.

        Args:
            as_sum: Some rank may have a sum of earlier micro-batches; then what travels has the dtype of sums on every
                rank, also on one that has none in this bucket. Equal on all ranks.
        """
        self._added = True  # counted from the start: when it is finished depends on the peers, and ranks must agree
        if as_sum and self._accumulator is None and not self._is_local:
            self.accumulate_locally()
        if self._accumulator is not None:
            source = self._take_accumulator()
        else:
            source = self._flat
        self.state = GradientState.REDUCING
        if self._is_local:
            self._work = None
            self._keep_local(source)
            return
        if self._before != 1.0:
            source.tensor.mul_(self._before)
        layout = self.bucket.layout
        numel = layout.slice_numel if self._policy.to_owner else layout.numel
        self._incoming = self._new_buffer(numel, self._sum_dtype, self._landing.incoming_home)
        self._rounds += 1
        reduce = self._transport.reduce_scatter if self._policy.to_owner else self._transport.all_reduce
        is_result = self._result is None and not self._narrows and self._group.combine is None
        self._squares = Squares(self.bucket.device) if self._is_last and is_result else None
        self._work = reduce(
            source.tensor,
            self._incoming.tensor,
            Reduction(
                scale=self._after if self._group.combine is None else 1.0,
                key=transfer_key(self._transport.owner, self.bucket.index, _REDUCTION, self._rounds),
                label=f"the reduction of the gradients of {self.bucket.label}",
                limit=self._policy.bucket_numel,
                visit=None if self._squares is None else self._squares.add,
            ),
        )
        self._source = source

    def _take_accumulator(self) -> FlatBuffer:
        """The local sum, with a packed micro-batch added to it, in the dtype that travels.

        It travels once for many micro-batches, so it goes in the precision it was summed in, unless the configuration
        names a dtype for the wire.
        """
        assert self._accumulator is not None
        if self.state is GradientState.FILLING:
            self.accumulate_locally()
        total, self._accumulator = self._accumulator, None
        if self._is_local or not self._policy.sums_travel_as_gradients:
            return total
        if total.tensor.dtype == self._flat.tensor.dtype:
            return total
        self._flat.grow()
        self._flat.tensor.copy_(total.tensor)
        total.free()
        return self._flat

    def _keep_local(self, source: FlatBuffer) -> None:
        """A group of one: the packed gradient is the result; further backwards are added to it."""
        if self._after * self._before != 1.0:
            source.tensor.mul_(self._after * self._before)
            self._squares = None
        if self._result is None:
            # Where that is the packed buffer, the next pack moves it out of the way.
            self._result = self._landing.land(source)
        else:
            self._squares = Squares(self._result.tensor.device) if self._is_last else None
            self._result = self._landing.add(self._result, source, self._accumulate_dtype, self._squares)

    def _move_result_out_of_flat(self) -> None:
        """Another backward needs the packed buffer that still holds the result of the last one."""
        if self._result is self._flat:
            self._result = self._new_buffer(self._flat.tensor.numel(), self._accumulate_dtype)
            self._result.tensor.copy_(self._flat.tensor)

    def will_arrive(self) -> bool:
        """Whether the reduction can be finished without a further call of this rank."""
        return self._work is None or self._work.will_arrive()

    def finish_reduction(self) -> None:
        """REDUCING -> REDUCED: waits and adds the reduced gradient to what earlier backwards left."""
        if self.state is not GradientState.REDUCING:
            return
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._source.free()
            assert self._incoming is not None
            incoming, self._incoming = self._incoming, None
            if self._group.combine is None:
                self._deliver(incoming)
            elif self._partial is None:
                self._partial = incoming
            else:
                self._partial.tensor.add_(incoming.tensor)
                incoming.free()
        self.state = GradientState.REDUCED

    def _deliver(self, reduced: FlatBuffer) -> None:
        """Adds a sum over all ranks to what the update will read."""
        if self._result is None:
            self._result = self._landing.land(self._in_accumulate_dtype(reduced))
        else:
            self._squares = Squares(self._result.tensor.device) if self._is_last else None
            self._result = self._landing.add(self._result, reduced, self._accumulate_dtype, self._squares)

    @property
    def has_partial_sum(self) -> bool:
        """Whether a sum waits for its second step."""
        return self._partial is not None

    def start_combining(self) -> None:
        """Sends the partial sum to the ranks with the same slice; nothing to do where there is none."""
        if self._partial is None:
            return
        transport, to_owner = self._group.combine, self._group.is_spread
        assert transport is not None and self._work is None
        numel = self._partial.tensor.numel() // (transport.size if to_owner else 1)
        self._incoming = self._new_buffer(numel, self._sum_dtype, self._landing.incoming_home)
        self._rounds += 1
        combine = transport.reduce_scatter if to_owner else transport.all_reduce
        self._work = combine(
            self._partial.tensor,
            self._incoming.tensor,
            Reduction(
                scale=self._after,
                key=transfer_key(transport.owner, self._number_among_copies, _REDUCTION, self._rounds),
                label=f"the sum of the gradients of {self.bucket.label} over all groups",
                limit=self._policy.bucket_numel,
            ),
        )

    @property
    def _number_among_copies(self) -> int:
        """What the ranks with the same slices call the bucket; those with other parts of the model index otherwise."""
        layout = self.bucket.layout
        return zlib.crc32(layout.tiles[0].logical.encode()) if self._group.spans_parts else layout.index

    def finish_combining(self) -> None:
        """Waits for :meth:`start_combining`."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        assert self._partial is not None and self._incoming is not None
        partial, self._partial = self._partial, None
        incoming, self._incoming = self._incoming, None
        partial.free()
        self._deliver(incoming)

    @property
    def _narrows(self) -> bool:
        """Whether sums over ranks are rounded to the dtype of sums over micro-batches."""
        return self._accumulate_dtype != self._sum_dtype and self._policy.every_micro_batch

    def _in_accumulate_dtype(self, reduced: FlatBuffer) -> FlatBuffer:
        if not self._narrows:
            return reduced
        narrower = self._new_buffer(reduced.tensor.numel(), self._accumulate_dtype, self._landing.incoming_home)
        narrower.tensor.copy_(reduced.tensor)
        reduced.free()
        return narrower

    def _new_buffer(self, numel: int, dtype: torch.dtype, home: Home = Home.DEVICE) -> FlatBuffer:
        return FlatBuffer(numel, dtype, self.bucket.device, kind=Kind.GRADIENT, ledger=self._ledger, home=home)

    # -- the update's side -------------------------------------------------------------------------------------------

    @property
    def result(self) -> torch.Tensor | None:
        """The reduced gradient, or None."""
        if self._result is None:
            return None
        self._landing.wait(self._result)
        return self._result.tensor

    def sum_of_squares(self) -> float:
        """Of the reduced gradient; 0 without one. Reads the gradient only where making it could not do that already."""
        result = self.result
        if result is None:
            return 0.0
        return squared_norm(result).item() if self._squares is None else self._squares.item()

    def note_write(self, tile: int) -> None:
        """Somebody has given parameter ``tile`` another gradient, or one where backward gave it none."""
        self._squares = None
        self.used[tile] = True

    def relocate(self, copy: Callable[[torch.Tensor], torch.Tensor], home: Home) -> None:
        """Moves gradients that wait for an update to other memory.

        Args:
            copy: Makes the copy there.
            home: Where, for the books.
        """
        if self._result is not None and self._landing.home is Home.DEVICE:
            old, self._result = self._result, FlatBuffer.holding(copy(self._result.tensor), self._result, home)
            old.free()
        for name in ("_accumulator", "_partial"):
            old = getattr(self, name)
            if old is not None:
                setattr(self, name, FlatBuffer.holding(copy(old.tensor), old, home))
                old.free()

    def free_idle_buffer(self) -> None:
        """Frees the packed buffer, which a group of one keeps allocated between steps."""
        if self._result is not self._flat:
            self._flat.free()

    def clear(self) -> None:
        """After the update, or on ``zero_grad``: frees every gradient of the bucket.

        In a group of one the packed buffer is the gradient, so all of them are alive together at every step; they stay
        allocated in between, because giving them back to the system would cost a page fault per 4 KiB in each backward.
        """
        for buffer in (self._result, self._accumulator, self._partial):
            if buffer is not None and buffer is not self._flat:
                buffer.free()
        if not (self._is_local and self._result is self._flat):
            self._flat.free()
        self._result = self._accumulator = self._partial = self._squares = None
        self.used = [False] * len(self.used)
        self.begin_backward()
