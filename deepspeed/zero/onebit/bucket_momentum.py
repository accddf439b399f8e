"""The exchange of one bucket's momentum: the message, its unit, and the result.

A message has one scale, so its elements are normalized: momentum is divided by the root of the variance, and movements
also by their param group's learning rate relative to the largest one. Then one number bounds all elements: Adam's
largest update (``ops.onebit.phases.largest_update``).

A rank sends the whole momentum. If masters are sharded, a replicated copy is kept for that, besides the parts in the
optimizer's state; checkpoints have only these parts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from deepspeed.comm.base.codec import Residual
from deepspeed.comm.codecs.one_bit import OneBitExchange, padded_numel
from deepspeed.comm.transports.transport import LocalTransport, transfer_key
from deepspeed.ops.onebit.phases import ExchangesMomentum, frozen_root, largest_update, mask_of
from deepspeed.zero.gradient.gradient_bucket import GradientBucket
from deepspeed.zero.storage import FlatBuffer, MemoryTracker, StorageKind
from deepspeed.zero.update.masters import MasterBucket

_MOMENTUM = 3  # kind of transfer, see transfer_key


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a message: its tile, its first element in the message, and how many it has."""

    tile: int
    start: int
    numel: int

    @property
    def place(self) -> slice:
        """Its elements in the message."""
        return slice(self.start, self.start + self.numel)


class BucketMomentum:
    """The momentum of one bucket as a message: the trained tensors one after the other, without padding."""

    def __init__(self, optimizer: torch.optim.Optimizer, master: MasterBucket, memory_tracker: MemoryTracker) -> None:
        self.master = master  # the bucket's master
        self._optimizer = optimizer
        self._transport = master.bucket.group.reduce
        layout = master.layout
        trained = [tile for tile, one in enumerate(layout.tiles) if one.param_group >= 0 and one.numel]
        ends = [0]
        for tile in trained:
            ends.append(ends[-1] + layout.tiles[tile].numel)
        self._tensors = [_Tensor(tile, *interval) for tile, interval in zip(trained, _intervals(ends), strict=True)]
        self.numel = ends[-1]
        size = self._transport.size
        padded = padded_numel(self.numel, size)
        # the errors of this rank, 1-D fp32: of what it sends, then of the slice that it sums
        self.private: FlatBuffer | None = None
        if not isinstance(self._transport, LocalTransport):
            self.private = self._buffer(padded + padded // size, memory_tracker)
            self._error = Residual(self.private.tensor[:padded], self.private.tensor[padded:])
        else:
            nothing = torch.zeros(0, device=master.bucket.device)
            self._error = Residual(nothing, nothing)
        self._padded = padded
        assert isinstance(optimizer, ExchangesMomentum)
        # the whole momentum as of the last update, in the order of the message; None where the optimizer's state has
        # all of it
        self.momentum = self._buffer(padded, memory_tracker) if master.is_sharded else None
        # in the same case, what momentum is divided by before it is sent; None where it is sent as it is
        self.root: FlatBuffer | None = None
        if master.is_sharded and optimizer.precondition and self.private is not None:
            self.root = self._buffer(padded, memory_tracker)
        self._mask: torch.Tensor | None = None
        self._message: torch.Tensor | None = None
        self._unit: torch.Tensor | None = None  # of the message in flight
        self._shares: list[float] | None = None  # by param group, for the message in flight
        self._still: list[slice] = []  # parts of the message in flight whose tensors do not take part
        self._saved_errors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._flags: list[bool] = []
        self._work: OneBitExchange | None = None
        self.rounds = 0

    def _buffer(self, numel: int, memory_tracker: MemoryTracker) -> FlatBuffer:
        made = FlatBuffer(
            numel, torch.float32, self.master.bucket.device, kind=StorageKind.PRIVATE, memory_tracker=memory_tracker
        )
        made.tensor.zero_()
        return made

    def _group(self, tensor: _Tensor) -> int:
        return self.master.layout.tiles[tensor.tile].param_group

    def _coefficient(self, tensor: _Tensor) -> float:
        assert isinstance(self._optimizer, ExchangesMomentum)
        return self._optimizer.coefficient(self.master.layout.tiles[tensor.tile].name)

    # -- the momentum that all ranks have ------------------------------------------------------------------------------

    def collect(self) -> None:
        """Makes the replicated momentum whole from the parts in the ranks' optimizer states; a collective."""
        if self.momentum is not None:
            self._gather("exp_avg", self.momentum.tensor)
        if self.root is not None:
            self._gather("exp_avg_sq", self.root.tensor)
            self._make_root(self.root.tensor)

    def _gather(self, key: str, out: torch.Tensor) -> None:
        """Gathers the whole of a state, in the order of the message."""
        master, layout = self.master, self.master.layout
        flat = torch.zeros(layout.numel, device=out.device)
        lower = layout.slice_bounds(master.rank)[0]
        for run in master.runs:
            state = self._optimizer.state.get(run.param) or {}
            if key in state:
                flat[lower + run.interval.start : lower + run.interval.stop] = state[key].view(-1)
        self.rounds += 1
        owners = master.transport
        owners.all_gather(flat, key=self._key(owners.owner), label=f"the momentum of {master.bucket.label}").wait()
        for tensor in self._tensors:
            start = layout.starts[tensor.tile]
            out[tensor.place] = flat[start : start + tensor.numel]

    @property
    def error_kind(self) -> str:
        """The unit of the errors, for checkpoints: errors in another unit are not restored."""
        assert isinstance(self._optimizer, ExchangesMomentum)
        return "update" if self._optimizer.precondition else "momentum"

    def _make_root(self, variance: torch.Tensor) -> None:
        """Turns a variance, in the order of the message, into the divisor of momentum; infinite where nothing moves."""
        frozen_root(variance, out=variance)
        for tensor in self._tensors:
            variance[tensor.place].add_(float(self._optimizer.param_groups[self._group(tensor)]["eps"]))

    def find_root(self, gradient: torch.Tensor | None = None, flags: Sequence[bool] = ()) -> torch.Tensor | None:
        """Returns what the message is divided by before it is sent; None: nothing. Do not change it.

        Args:
            gradient: 1-D, the whole bucket: as of a variance that is updated from it, which the states are not yet.
            flags: With it, per tile whether it is.
        """
        assert isinstance(self._optimizer, ExchangesMomentum)
        if not self._optimizer.precondition:
            return None
        if self.root is not None:
            return self.root.tensor
        made = torch.zeros(self._padded, dtype=torch.float32, device=self.master.bucket.device)
        found = self.of_states("exp_avg_sq")
        for tensor in self._tensors:
            if tensor.tile in found:
                made[tensor.place] = found[tensor.tile]
            if gradient is not None and flags[tensor.tile]:
                beta = float(self._optimizer.param_groups[self._group(tensor)]["betas"][1])
                part = gradient[self._place_in_bucket(tensor)]
                made[tensor.place].mul_(beta).addcmul_(part, part, value=1 - beta)
        self._make_root(made)
        return made

    def _place_in_bucket(self, tensor: _Tensor) -> slice:
        start = self.master.layout.starts[tensor.tile]
        return slice(start, start + tensor.numel)

    def mask_gradient(self, gradient: torch.Tensor) -> None:
        """Applies ``exp_avg_mask`` to a gradient, 1-D, the whole bucket."""
        mask = self._find_mask()
        if mask is not None:
            for tensor in self._tensors:
                gradient[self._place_in_bucket(tensor)].mul_(mask[tensor.place])

    def _limit(self, rate: float) -> float:
        """Returns the largest absolute value of an element in that unit, at learning rate ``rate``.

        One number, as there is one scale: if an element's own limit were below the scale, each exchange would cut off
        its error feedback, and with that its value.
        """
        groups = [self._optimizer.param_groups[self._group(tensor)] for tensor in self._tensors]
        return max((largest_update(group["betas"], rate) for group in groups), default=0.0)

    def multiply_errors(self, by: Sequence[float]) -> None:
        """Scales the error-feedback residuals, one factor per param group. For local steps (0/1 Adam)."""
        for tensor in self._tensors:
            factor = by[self._group(tensor)]
            if factor != 1.0:
                for errors in self._errors_of(tensor):
                    errors.mul_(factor)

    def _errors_of(self, tensor: _Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of this rank's residuals of the tensor: of what it sent, and of its slice."""
        sent, owned = self._error.sent, self._error.owned
        assert owned is not None
        first = self._transport.rank * owned.numel()
        lower, upper = max(tensor.start - first, 0), min(tensor.start + tensor.numel - first, owned.numel())
        return sent[tensor.place], owned[lower : max(lower, upper)]

    def rescale(self, factor: torch.Tensor) -> None:
        """Multiplies the residuals by ``factor`` (1-D, as long as the message), as the unit of the message changes."""
        if self.private is not None:
            assert self._error.owned is not None
            self._error.sent.mul_(factor)
            self._error.owned.mul_(self._transport.my_slice(factor))

    def _key(self, owner: int) -> int:
        return transfer_key(owner, self.master.bucket.index, _MOMENTUM, self.rounds)

    def _old(self) -> list[torch.Tensor | None]:
        """Returns the momentum of each tensor of the message before this update; None: there was no update yet."""
        if self.momentum is not None:
            return [self.momentum.tensor[tensor.place] for tensor in self._tensors]
        found = self.of_states("exp_avg")
        return [found.get(tensor.tile) for tensor in self._tensors]

    def of_states(self, key: str) -> dict[int, torch.Tensor]:
        """Returns the views of a per-element state by tile, where masters are not cut.

        Without those that were never updated.
        """
        found: dict[int, torch.Tensor] = {}
        for run in self.master.runs:
            state = self._optimizer.state.get(run.param) or {}
            if key in state:
                for tile, start, _ in self.master.tile_intervals(run.interval):
                    offset = start - run.interval.start
                    numel = self.master.layout.tiles[tile].numel
                    found[tile] = state[key].view(-1)[offset : offset + numel]
        return found

    # -- one update ----------------------------------------------------------------------------------------------------

    def start(
        self,
        gradient: torch.Tensor | None,
        factor: float,
        flags: list[bool],
        *,
        multiply: Sequence[float] | None = None,
        add: Mapping[int, torch.Tensor] | None = None,
        only_added: Collection[int] = (),
        rates: Sequence[float] | None = None,
    ) -> None:
        """Sends this rank's momentum.

        Args:
            gradient: 1-D, the whole bucket, this rank's own; None: it has none, which counts as zeros.
            factor: Multiplier of the gradient.
            flags: Per tile, whether any rank has a gradient of it; the others stay as they are.
            multiply: For local steps (0/1 Adam), as all that follow. By param group, what it is multiplied by before it
                is sent.
            add: By tile, what is added then.
            only_added: Tiles of which only ``add`` is sent.
            rates: By param group, the sum of the learning rates that what is sent has in it; None: momentum has none.
                A group with 0 takes no part: it must not move, which a sign cannot encode.
        """
        device = self.master.bucket.device
        self._flags = flags
        message = self._message = torch.zeros(self._padded, dtype=torch.float32, device=device)
        self._saved_errors, self._still = [], []
        for tensor, old in zip(self._tensors, self._old(), strict=True):
            part = message[tensor.place]
            if not flags[tensor.tile] or (rates is not None and not rates[self._group(tensor)]):
                # A tensor that does not take part is sent as zeros; its errors are restored afterwards.
                self._still.append(tensor.place)
                for errors in self._errors_of(tensor):
                    self._saved_errors.append((errors, errors.clone()))
                    errors.zero_()
                continue
            if tensor.tile in only_added:
                assert add is not None
                part.copy_(add[tensor.tile])
                continue
            beta = float(self._optimizer.param_groups[self._group(tensor)]["betas"][0])
            if gradient is not None:
                part.copy_(gradient[self._place_in_bucket(tensor)]).mul_((1 - beta) * factor)
            if old is not None:
                part.add_(old, alpha=beta)
            coefficient = self._coefficient(tensor)
            if coefficient != 1.0:
                part.mul_(coefficient)
            if multiply is not None:
                part.mul_(multiply[self._group(tensor)])
            if add is not None:
                part.add_(add[tensor.tile])
        self._launch(message, rates)

    def divide(self, by: Sequence[float]) -> None:
        """Divides the received momentum, by param group. For local steps (0/1 Adam)."""
        assert self._message is not None
        for tensor in self._tensors:
            self._message[tensor.place].div_(by[self._group(tensor)])

    def _launch(self, message: torch.Tensor, rates: Sequence[float] | None) -> None:
        self._apply_mask(message)
        self._unit = self.find_root()
        if self._unit is not None:
            message.div_(self._unit)
        most, self._shares = 1.0, None
        if rates is not None:
            most = max((rates[self._group(tensor)] for tensor in self._tensors), default=0.0)
            self._shares = [rate / most if rate and most else 1.0 for rate in rates]
            inverse = [1 / share for share in self._shares]
            self._multiply(message, inverse)
            self.multiply_errors(inverse)
        limit = math.inf if self._unit is None else self._limit(most)
        self.rounds += 1
        label = f"the momentum of {self.master.bucket.label}"
        self._work = OneBitExchange(
            self._transport,
            message,
            self.numel,
            self._error,
            key=self._key(self._transport.owner),
            label=label,
            limit=limit,
        )

    def _multiply(self, message: torch.Tensor, by: Sequence[float]) -> None:
        for tensor in self._tensors:
            factor = by[self._group(tensor)]
            if factor != 1.0:
                message[tensor.place].mul_(factor)

    def finish(self) -> None:
        """Waits for the exchange; afterwards all ranks have the same momentum."""
        assert self._work is not None and self._message is not None
        self._work.finish()
        self._work = None
        if self._unit is not None:
            self._message.mul_(self._unit.masked_fill(self._unit.isinf(), 0.0))
            self._unit = None
        if self._shares is not None:
            self._multiply(self._message, self._shares)
            self.multiply_errors(self._shares)
            self._shares = None
        for place in self._still:
            self._message[place] = 0.0
        self._apply_mask(self._message)
        mask = self._find_mask()
        if mask is not None and self.private is not None:
            assert self._error.owned is not None
            self._error.sent.mul_(mask)
            self._error.owned.mul_(self._transport.my_slice(mask))
        for tensor in self._tensors:
            coefficient = self._coefficient(tensor)
            if coefficient != 1.0:
                self._message[tensor.place].div_(coefficient)
        for errors, before in self._saved_errors:
            errors.copy_(before)
        self._saved_errors = []

    def _apply_mask(self, message: torch.Tensor) -> None:
        mask = self._find_mask()
        if mask is not None:
            message.mul_(mask)

    def _find_mask(self) -> torch.Tensor | None:
        """Returns 1 where momentum may be nonzero, as long as the message; None: everywhere."""
        layout, groups = self.master.layout, self._optimizer.param_groups
        if not any(group.get("exp_avg_mask") is not None for group in groups):
            return None
        if self._mask is None:
            self._mask = torch.ones(self._padded, device=self.master.bucket.device)
            for tensor in self._tensors:
                tile = layout.tiles[tensor.tile]
                mask = mask_of(groups[tile.param_group], tensor.numel, tile.name)
                if mask is not None:
                    self._mask[tensor.place] = mask.to(self._mask)
        return self._mask

    def settle(self, gradients: GradientBucket) -> None:
        """Stores the received momentum as the bucket's gradient, which the update reads."""
        assert self._message is not None
        message, self._message = self._message, None
        for tensor, old in zip(self._tensors, self._old(), strict=True):
            if not self._flags[tensor.tile] and old is not None:
                message[tensor.place] = old
        starts = {tensor.tile: tensor.start for tensor in self._tensors}
        made = gradients.new_result(self.master.flat.numel())
        result = made.tensor
        for fragment in self.master.fragments:
            if fragment.tile in starts:
                start = starts[fragment.tile] + fragment.tile_start
                result[fragment.in_slice] = message[start : start + fragment.numel]
        gradients.sum.add_reduced(made)
        if self.momentum is not None:
            self.momentum.tensor.copy_(message)


def _intervals(ends: Sequence[int]) -> list[tuple[int, int]]:
    return [(start, stop - start) for start, stop in pairwise(ends)]
