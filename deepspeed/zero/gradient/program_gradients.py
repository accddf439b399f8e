"""What a program sees in ``parameter.grad`` between backwards, and what its calls of torch do there.

Sums of gradients are in flat buffers, in another dtype, unreduced or sharded, so ``.grad`` cannot be a view of them.
After each backward it holds a :class:`PendingGradient`, whose operations change the sums. Before the next backward and
before the update, a ``.grad`` that is no longer that object shows that the program discarded or replaced the gradient
(``module.zero_grad()``, ``parameter.grad = None``). That needs no communication; all ranks must do the same, which the
update compares.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import DisableTorchFunctionSubclass

from deepspeed.errors import CallOrderError
from deepspeed.zero.address import set_gradient
from deepspeed.zero.gradient.gradient_bucket import GradientBucket
from deepspeed.zero.gradient.pending_gradient import REMEDY, PendingGradient
from deepspeed.zero.tiling.layout import DATA


class _SummedGradient:
    """One trained parameter.

    Attributes:
        is_shown: Whether ``handle`` was put into ``.grad``, and not taken out here since.
        added: What was added to the gradient in other memory: of the parameter's shape, or None.
        is_accumulated: Autograd has added to it outside of a backward of this engine.
    """

    def __init__(self, owner: ProgramGradients, gradients: GradientBucket, index: int) -> None:
        self._owner = weakref.ref(owner)
        self.gradients = gradients
        self.index = index
        self.is_shown = self.is_accumulated = False
        self.added: torch.Tensor | None = None
        self.handle: PendingGradient | None = None
        self._references = 0
        self._kind: tuple[torch.device, torch.dtype] | None = None

    @property
    def parameter(self) -> torch.nn.Parameter:
        return self.gradients.bucket.params[self.index]

    @property
    def name(self) -> str:
        """Returns the parameter's qualified name."""
        return self.gradients.bucket.layout.tiles[self.index].name

    def show(self, parameter: torch.nn.Parameter) -> None:
        """Puts the handle into ``.grad``."""
        device_and_dtype = parameter.device, parameter.dtype
        if self.handle is None or self._kind != device_and_dtype:
            self.retire()
            self._kind = device_and_dtype
            shape = self.gradients.bucket.layout.tiles[self.index].shape
            self.handle = PendingGradient(self, parameter.data.new_empty(()).expand(shape))
            self._references = self._count_references()
        if parameter.shape != self.handle.shape:  # sharded, or given another shape, which the update refuses
            set_gradient(parameter, self.handle)
        else:
            parameter.grad = self.handle
        self.is_shown = True

    def _count_references(self) -> int:
        return sys.getrefcount(self.handle)

    def retire(self, *, if_kept: bool = False) -> None:
        """Makes the handle useless: a program that has kept it does not get another gradient by it."""
        if self.handle is not None and (not if_kept or self._count_references() > self._references):
            self.handle._entry = None
            self.handle = None

    def parts(self) -> Iterator[torch.Tensor]:
        """Returns this rank's parts of the sums of the parameter, 1-D, as views."""
        sums, layout = self.gradients.sum, self.gradients.bucket.layout
        start = layout.starts[self.index]
        stop = start + layout.tiles[self.index].numel
        for flat in (
            None if sums.local is None else sums.local.tensor,
            None if sums.partial is None else sums.partial.tensor,
            sums.read(),
        ):
            if flat is not None:
                first = self._first_element(flat.numel())
                yield flat[max(start - first, 0) : max(stop - first, 0)]

    def _first_element(self, numel: int) -> int:
        """Returns the element of the bucket at which a sum of ``numel`` elements begins."""
        bucket = self.gradients.bucket
        if numel == bucket.layout.numel:
            return 0
        if numel == bucket.layout.slice_numel:
            return bucket.layout.slice_bounds(bucket.transport.rank)[0]
        return bucket.share[0]

    def change(self, operation: Callable[[torch.Tensor], Any]) -> None:
        """Applies an operation in place, linear and elementwise, to this rank's parts of the gradient."""
        self._begin_change()
        for part in self.parts():
            operation(part)
        if self.added is not None:
            operation(self.added)

    def _begin_change(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner.before_change()
        self.gradients.sum.squares = None
        self.gradients.writes.add(self.index)

    def add(self, other: torch.Tensor) -> None:
        """Adds a tensor, in memory of its own: the next reduction adds it to the sums."""
        other = other.detach()
        self.added = other.clone() if self.added is None else self.added + other

    def discard(self) -> None:
        """Removes the gradient from the sums, as if it had never arrived."""
        self.change(torch.Tensor.zero_)
        self.added = None
        self.gradients.sum.used[self.index] = False
        self.is_shown = False
        self.retire(if_kept=True)

    def whole(self) -> torch.Tensor | str:
        """Returns the whole reduced gradient, in the parameter's shape, as a view; or why this rank cannot give it."""
        owner, gradients = self._owner(), self.gradients
        if owner is None:
            return "its engine is gone"
        if owner.unit.reason:
            return owner.unit.reason
        if any(one.bucket.group.name != DATA or one.bucket.group.is_part for one in owner.buckets):
            return "ranks hold different parts of this model"
        sums = gradients.sum
        present = [one.tensor for one in (sums.local, sums.partial, sums.reduced) if one is not None]
        layout = gradients.bucket.layout
        if not present or self.added is not None:
            return "a part of it is not in the engine's sum yet"
        if sums.reduced is None and not gradients.is_own_result:
            return "it is this rank's own until the backward at the boundary reduces it"
        if len(present) > 1:
            return "micro-batches that were not reduced yet are missing in it"
        if present[0].numel() != layout.numel:
            return f"ZeRO shards it over {layout.num_slices} ranks"
        if present[0].device != gradients.bucket.device:
            return "it is in host memory"
        shape = layout.tiles[self.index].shape
        return next(iter(self.parts())).view(shape)

    def read(self, operation: str) -> torch.Tensor:
        """Returns a copy of the whole gradient in the parameter's dtype.

        Raises:
            CallOrderError: This rank cannot give it.
        """
        whole = self.whole()
        if isinstance(whole, str):
            raise CallOrderError(f"{operation} of the .grad of {self.name!r}: it needs values, but {whole}. {REMEDY}")
        return whole.to(self.parameter.dtype, copy=True)

    def write(self, value: torch.Tensor) -> None:
        """Replaces the whole gradient."""
        whole = self.whole()
        assert not isinstance(whole, str), "it was read before"
        if not self.gradients.used[self.index] and bool(value.any()):
            raise CallOrderError(self._unused())
        self._begin_change()
        whole.copy_(value)

    def _unused(self) -> str:
        return (
            f"the .grad of {self.name!r}: no backward on this rank has reached the parameter (.grad stands for that "
            "of other ranks). Leave it out, freeze the parameter, or assign a tensor to .grad"
        )

    def refuse_addition(self) -> None:
        """Raises if a program may not add to the gradient.

        Raises:
            CallOrderError: There is none on this rank, or it has a factor that the program's values lack.
        """
        if not self.gradients.used[self.index]:
            raise CallOrderError(self._unused())
        self._refuse_unscaled("an addition")

    def refuse_assignment(self) -> None:
        """Raises if a program may not replace the gradient.

        Raises:
            CallOrderError: Gradients have a factor that the program's values lack.
        """
        self._refuse_unscaled("an assignment")

    def _refuse_unscaled(self, what: str) -> None:
        owner = self._owner()
        if owner is not None and owner.unit.reason:
            raise CallOrderError(
                f"{what} to the .grad of {self.name!r}: it would mix plain values with the gradient's, but "
                f"{owner.unit.reason}. {REMEDY}"
            )


@dataclass(frozen=True)
class GradientUnit:
    """What the gradients of a loss are multiplied by until the update."""

    is_scaled: bool = False  # by the fp16 loss scale
    is_counted: bool = False  # the losses are sums with a count, by which the update divides

    @property
    def reason(self) -> str:
        """Why the gradients differ from those of the loss; "" if they do not."""
        if self.is_scaled:
            return "under fp16 it carries the loss scale until the update"
        if self.is_counted:
            return "losses have a count (engine.backward(loss, count=...)), by which only the update divides"
        return ""


@dataclass
class DiscardReport:
    """Which gradients the program has discarded by torch's calls."""

    all: bool = False  # those of all parameters at once
    some: bool = False  # those of some parameters


class RunGradients(Protocol):
    """Describes the gradients of the runs of masters; see ``zero.update.run_gradients``."""

    def show(self) -> None:
        """Puts tensors into ``.grad`` that refuse everything."""

    def hide(self) -> None:
        """Takes them out of ``.grad``."""

    def check(self) -> None:
        """Raises ``CallOrderError`` if the program has set ``.grad``."""


class ProgramGradients:
    """Shows the gradients of one engine in ``.grad``, and takes over what the program does to them."""

    def __init__(
        self, buckets: list[GradientBucket], before_change: Callable[[], None], runs: RunGradients | None = None
    ) -> None:
        self.buckets = buckets  # those of the reducer; the list may grow
        self.before_change = before_change  # called before a sum changes
        self.unit = GradientUnit()  # of the gradients since the last update
        self._is_enabled = False  # whether anything is shown
        self._discards = DiscardReport()
        self._entries: list[list[_SummedGradient]] = []
        self._shown: list[_SummedGradient] = []
        self._runs = runs

    def begin(self, unit: GradientUnit | None) -> None:
        """Takes the handles out of ``.grad``, where what was added to them stays. Called before a backward.

        Args:
            unit: The unit of the backward's gradients; None: they are not shown, as in a pipeline.
        """
        self._is_enabled = unit is not None
        self.unit = unit or GradientUnit()
        with DisableTorchFunctionSubclass():
            for entry in self._shown:
                self._take_out(entry)
        self._shown.clear()

    def take_discards(self) -> DiscardReport:
        """Returns which gradients the program has discarded since the last call of this method."""
        taken, self._discards = self._discards, DiscardReport()
        return taken

    def show(self) -> None:
        """Puts handles into ``.grad`` of parameters that may have a gradient on some rank. Called after a backward."""
        if not self._is_enabled or not any(any(gradients.used) for gradients in self.buckets):
            return  # torch.autograd.grad leaves no gradients
        for gradients in self.buckets[len(self._entries) :]:
            self._entries.append(
                [_SummedGradient(self, gradients, index) for index in range(len(gradients.bucket.params))]
            )
        with DisableTorchFunctionSubclass():
            for gradients, entries in zip(self.buckets, self._entries, strict=True):
                if gradients.is_local and gradients.sum.is_empty:
                    continue
                used = gradients.sum.used
                for entry, parameter in zip(entries, gradients.bucket.params, strict=True):
                    # Other ranks may have used a parameter that this one has not; all must see the same.
                    wanted = used[entry.index] or (not gradients.is_local and parameter.requires_grad)
                    if wanted and not entry.is_shown and parameter.grad is None:
                        entry.show(parameter)
                        self._shown.append(entry)
        if self._runs is not None:
            self._runs.show()

    def apply(self) -> None:
        """Does to the sums what the program has done to ``.grad`` since the backward.

        Raises:
            CallOrderError: It cannot be done.
        """
        if not self._shown:
            return
        if self._runs is not None:
            self._runs.check()
        discarded = []
        with DisableTorchFunctionSubclass():
            for entry in self._shown:
                parameter = entry.parameter
                grad = parameter.grad
                if grad is entry.handle:
                    continue
                if isinstance(grad, PendingGradient):
                    self._take_derived(entry, grad, parameter)
                    continue
                if grad is not None:
                    entry.refuse_assignment()
                discarded.append(entry)
        if discarded:
            self._discard(discarded)

    def _take_derived(self, entry: _SummedGradient, derived: PendingGradient, parameter: torch.nn.Parameter) -> None:
        """Takes ``parameter.grad + tensor``, or a detached ``parameter.grad``, that was assigned to ``.grad``."""
        if derived.entry("assignment") is not entry or derived._views:
            raise CallOrderError(
                f"parameter.grad of {entry.name!r}: was given the gradient of another parameter, or a view of one; "
                "give it a tensor with values"
            )
        if derived._more is not None:
            entry.add(derived._more)
        set_gradient(parameter, entry.handle)

    def _discard(self, entries: list[_SummedGradient]) -> None:
        if len(entries) == len(self._shown):
            self._discards.all = True
        elif self.unit.is_counted:
            raise CallOrderError(
                "zero_grad or grad = None of some parameters: expected all of them, since the losses have a count "
                "(engine.backward(loss, count=...)) and the update divides all gradients by one sum of counts. Give "
                "mean losses without count, or discard all gradients with engine.zero_grad()"
            )
        else:
            self._discards.some = True
        for entry in entries:
            entry.is_shown = False
        self._shown = [entry for entry in self._shown if entry.is_shown]
        kept = {id(entry.gradients) for entry in self._shown}
        for gradients, members in groupby(entries, key=lambda entry: entry.gradients):
            if id(gradients) not in kept:
                gradients.discard_sums()
            for entry in members:
                entry.discard()

    def _take_out(self, entry: _SummedGradient) -> None:
        set_gradient(entry.parameter, entry.added)
        entry.added = None
        entry.is_shown = entry.is_accumulated = False

    def give_additions(self) -> None:
        """Leaves what was added in ``.grad``, for the reduction before the update."""
        added = [entry for entry in self._shown if entry.added is not None]
        if added:
            with DisableTorchFunctionSubclass():
                for entry in added:
                    self._take_out(entry)
            self._shown = [entry for entry in self._shown if entry.is_shown]

    def take_stray(self, position: int, index: int) -> None:
        """Called when autograd has added a gradient to the ``.grad`` of a parameter before a backward was opened."""
        entry = self._entries[position][index] if position < len(self._entries) else None
        if entry is None or not entry.is_shown or not entry.is_accumulated:
            return  # a discarded or replaced gradient, which `apply` finds
        with DisableTorchFunctionSubclass():
            if entry.parameter.grad is not entry.handle:
                entry.added = entry.parameter.grad  # with a graph: create_graph=True
            self._take_out(entry)
        self._shown.remove(entry)

    def clear(self) -> None:
        """Takes the handles out of ``.grad``, and makes those useless that the program has kept."""
        if self._runs is not None:
            self._runs.hide()
        with DisableTorchFunctionSubclass():
            for entry in self._shown:
                entry.added = None
                if entry.parameter.grad is entry.handle:
                    self._take_out(entry)
                entry.is_shown = False
        self._shown.clear()
        for entries in self._entries:
            for entry in entries:
                entry.retire(if_kept=True)
