"""Module hooks: they turn a forward into scopes that hold buckets, and detect the start of a backward.

A *scope* is one running forward of the root module or of a unit. Entering the scope of a unit makes its buckets FULL
and counts one user each; leaving it takes the users back and reshards what nothing near needs. The outermost scope
opens and closes the pass of the schedule and carries the saved-tensor hooks. A hook on what it returns opens the
backward that runs through it, regardless of which code calls the module. A module between the root and the units opens
a scope only where it is the outermost, which lets a program call part of a model by itself (an encoder, before text is
generated). A forward inside a backward is recomputation: it gathers but does not reshard; the buckets stay until their
gradients are in or the next unit is recomputed.

A whole training step may run inside the forward of the root module (Lightning's manual optimization does). Then the
backward and the update *pause* the forwards around them; what gathers next opens them again.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed.errors import NotYetSupportedError
from deepspeed.torch_private import differentiates_a_function
from deepspeed.uncompiled import uncompiled
from deepspeed.zero.address import NOT_IN_A_GRAPH, Gatherer
from deepspeed.zero.bucket import Bucket, State
from deepspeed.zero.gather.handles import SavedTensorHooks
from deepspeed.zero.gather.schedule import GatherSchedule


@dataclass
class _Scope:
    """One running forward of the module with the number ``entry``."""

    entry: int  # number of the module
    buckets: list[Bucket]  # what the module needs
    opened_pass: bool = False  # whether it has begun the open pass of the schedule
    pushed_hooks: bool = False  # whether it has installed the saved-tensor hooks
    pushed_guard: bool = False  # whether it has put a guard over saved-tensor hooks of other libraries
    held: list[Bucket] = field(default_factory=list)  # buckets of which it is a user


class _ScopeHook:
    """A module hook. In a copy of its module it does nothing: the copy is not the engine's."""

    def __init__(self, run: Callable[[Any], None]) -> None:
        self._run = run

    @partial(uncompiled, reason=NOT_IN_A_GRAPH)
    def __call__(self, *args: Any) -> None:
        self._run(args[-1])

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":  # what torch.jit.script compiles hooks under
            raise AttributeError(
                "torch.jit.script cannot compile the hooks that gather sharded parameters at ZeRO stage 3. Compile a "
                "plain copy of the model that has loaded the weights of engine.export_weights()"
            )
        raise AttributeError(name)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _idle_hook

    def __reduce__(self) -> Any:
        return _get_idle_hook, ()


def _idle_hook(*_args: Any) -> None:
    return


def _get_idle_hook() -> Callable[..., None]:
    return _idle_hook


class ForwardHooks:
    """Owns the module hooks of sharded buckets.

    Args:
        units: Module and its sharded buckets; a module may appear once.
        in_backward: Whether a backward of this engine is running.
        on_outputs: Given what a training forward returns, and the number of its module.
    """

    def __init__(
        self,
        root: nn.Module,
        units: list[tuple[nn.Module, list[Bucket]]],
        buckets: list[Bucket],
        schedule: GatherSchedule,
        in_backward: Callable[[], bool],
        on_outputs: Callable[[Any, int], None],
    ) -> None:
        self._schedule = schedule
        self._in_backward = in_backward
        self._on_outputs = on_outputs
        self._buckets = buckets
        self._scopes: list[_Scope] = []
        self._paused: list[_Scope] = []  # outermost first; then there are no open scopes except those of a backward
        self._entered: list[bool] = []  # for every running forward of an entry: whether it opened a scope
        self._recomputed: dict[Bucket, bool] = {}  # under hooks of others: whether all gradients are there
        self._outstanding: Counter[int] = Counter()  # training forwards without their backward, by entry
        self._below: dict[int, frozenset[Bucket]] = {}
        self._reached: set[int] = set()  # entries whose outputs the open backward has come through
        self._saved = SavedTensorHooks(buckets, schedule.demand, self._last_handle_died)
        self.handles: list[RemovableHandle] = []
        self._by_module: dict[nn.Module, list[Bucket]] = {root: []}
        for module, unit_buckets in units:
            self._by_module.setdefault(module, []).extend(unit_buckets)
        self._entries = _entries(root, self._by_module)
        for bucket in buckets:
            bucket.gatherer = self._gatherer(bucket)
        self.install()

    def install(self) -> None:
        """Puts the hooks on the model; those that are there are replaced."""
        self.remove()
        if self._buckets:
            for number, (module, buckets) in enumerate(self._by_module.items()):
                self._hook(module, partial(self._enter, number, buckets), self._leave)
            for number, module in enumerate(self._entries, start=len(self._by_module)):
                self._hook(module, partial(self._enter_entry, number), self._leave_entry)

    def _hook(self, module: nn.Module, enter: Callable[[Any], None], leave: Callable[[Any], None]) -> None:
        # Registered first, so that the user's own hooks find the module's parameters full.
        self.handles.append(module.register_forward_pre_hook(_ScopeHook(enter), prepend=True))
        self.handles.append(module.register_forward_hook(_ScopeHook(leave), always_call=True))

    def remove(self) -> None:
        """Takes every hook from the model."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def close(self) -> None:
        """Removes every hook from the model for good, and the references that remaining graphs hold."""
        self.remove()
        self._saved.close()
        for bucket in self._buckets:
            bucket.gatherer = None

    # -- scopes ------------------------------------------------------------------------------------------------------

    def refuse_transforms(self) -> None:
        """Raises if a transform of ``torch.func`` that differentiates runs, or operations are recorded as a graph.

        Raises:
            NotYetSupportedError: One of the two: wrappers hide the storage of what is saved, and a gather is no
                operation of a graph. ``torch.compile`` and ``torch.export`` in strict mode do not come here: see
                ``NOT_IN_A_GRAPH``.
        """
        if not self._buckets:
            return
        if _records_a_graph():
            raise NotYetSupportedError(
                "torch.export, torch.jit.trace, torch.func.linearize and make_fx record operations, and cannot run the "
                "modules of a model at ZeRO stage 3, whose parameters are gathered in between. Record a plain copy of "
                "the model that has loaded the weights of engine.export_weights(), or use stage 0, 1 or 2; instead of "
                "linearize, torch.autograd.forward_ad works too"
            )
        if differentiates_a_function():
            raise NotYetSupportedError(
                "torch.func transforms that differentiate (grad, vjp, jacrev, jvp, ...) cannot run the modules of a "
                "model at ZeRO stage 3, where parameters are sharded; use stage 0, 1 or 2, or torch.autograd.grad"
            )

    def _enter(self, entry: int, buckets: list[Bucket], _inputs: Any) -> None:
        self._resume()
        if not self._scopes:
            self.refuse_transforms()
        scope = _Scope(entry, buckets)
        self._open(scope)
        if len(self._scopes) == 1:
            scope.pushed_hooks = self._saved.push()
        scope.pushed_guard = not scope.pushed_hooks and self._saved.push_guard()
        if self._in_backward():
            self._free_recomputed(except_for=buckets)
        for bucket in buckets:
            self._hold(scope, bucket)

    def _open(self, scope: _Scope) -> None:
        self._scopes.append(scope)
        if len(self._scopes) == 1 and not self._schedule.in_pass:
            self._schedule.begin("forward" if torch.is_grad_enabled() else "evaluation", scope.entry)
            scope.opened_pass = True

    def _enter_entry(self, entry: int, inputs: Any) -> None:
        self._entered.append(not self._scopes and not self._paused)
        if self._entered[-1]:
            self._enter(entry, [], inputs)

    def _leave_entry(self, outputs: Any) -> None:
        if self._entered and self._entered.pop():  # empty after an exception or a whole step inside this forward
            self._leave(outputs)

    def _hold(self, scope: _Scope, bucket: Bucket) -> None:
        self._schedule.demand(bucket)
        bucket.users += 1
        scope.held.append(bucket)

    def _leave(self, outputs: Any) -> None:
        if not self._scopes:
            # The forward was paused until its end, or an exception inside it has closed its scope.
            if self._paused:
                self._pop_hooks(self._paused.pop())
            return
        bare = not self._scopes[0].pushed_hooks  # hooks of other libraries save plain views
        scope = self._scopes.pop()
        is_training = scope.opened_pass and self._schedule.kind == "forward"
        try:
            self._close(scope, bare)
            if is_training:
                self._outstanding[scope.entry] += 1
                self._on_outputs(outputs, scope.entry)
        finally:  # diverging ranks raise above; the hooks must not outlive this forward
            self._pop_hooks(scope)

    def _pop_hooks(self, scope: _Scope) -> None:
        """Removes the saved-tensor hooks that a scope has installed."""
        if scope.pushed_hooks:
            self._saved.pop()
        if scope.pushed_guard:
            self._saved.pop_guard()

    def _close(self, scope: _Scope, bare: bool) -> None:
        recomputing = self._in_backward()
        for bucket in scope.held:
            bucket.users -= 1
            if bucket.users == 0 and bucket.state is State.FULL:
                if recomputing and bare:
                    is_settled = bucket.gradients_in or not bucket.layout.trainable
                    self._recomputed[bucket] = is_settled or self._recomputed.get(bucket, False)
                elif recomputing:
                    self._free_if_done(bucket)
                else:
                    self._after_use(bucket)
        scope.held.clear()
        if scope.opened_pass:
            scope.opened_pass = False
            is_training = self._schedule.kind == "forward"
            self._schedule.end()
            self._free_unused(is_training)

    def pause(self) -> None:
        """Pauses the running forwards for a backward or an update inside them. All ranks must do so.

        The saved-tensor hooks stay: a later forward of the same step needs them, and nothing else is harmed by them.
        """
        if self._in_backward():
            return
        while self._scopes:
            scope = self._scopes.pop()
            self._close(scope, bare=False)
            self._paused.insert(0, scope)

    def _resume(self) -> None:
        """Resumes paused forwards when the next gather is part of them."""
        if self._scopes or self._in_backward():
            return
        while self._paused:
            scope = self._paused.pop(0)
            self._open(scope)
            for bucket in scope.buckets:
                self._hold(scope, bucket)

    def _after_use(self, bucket: Bucket) -> None:
        if bucket.is_kept:
            return
        # Also what ran under no_grad: ranks that skipped it keep it, and ranks must keep the same.
        if self._schedule.kind == "forward" and self._schedule.stays_after_forward(bucket):
            bucket.is_kept = True
        else:
            bucket.reshard()

    def _free_unused(self, is_training: bool) -> None:
        """Frees, after a forward, buckets that this rank gathered only for other ranks, unless these keep them."""
        for bucket in self._buckets:
            if bucket.state is State.FULL and bucket.users == 0 and not bucket.is_kept:
                if is_training and self._schedule.stays_after_forward(bucket):
                    bucket.is_kept = True
                else:
                    bucket.reshard()

    def _free_recomputed(self, except_for: list[Bucket]) -> None:
        """Frees what an earlier unit's recomputation gathered, when the next one begins.

        Its gradients may be outstanding.
        """
        for bucket, is_settled in list(self._recomputed.items()):
            if is_settled and bucket not in except_for and bucket.users == 0:
                del self._recomputed[bucket]
                self._free_if_done(bucket)

    def abandon(self) -> None:
        """Closes every scope and frees every bucket after an exception or at the end of a backward."""
        for scopes in (self._scopes, self._paused):
            while scopes:
                self._pop_hooks(scopes.pop())
        self._entered.clear()
        self._recomputed.clear()
        for bucket in self._buckets:
            bucket.users = bucket.pins
        self.free_all()

    def free_all(self) -> None:
        """Reshards every gathered bucket that is not in use."""
        self._recomputed.clear()
        self._outstanding.clear()
        self._free_except(frozenset())

    def _free_except(self, kept: Set[Bucket]) -> None:
        for bucket in self._buckets:
            if bucket.users == 0 and bucket.state is State.FULL and not (bucket.is_kept and bucket in kept):
                bucket.reshard()

    def reach(self, entry: int) -> None:
        """Called when the open backward has come through the outputs of a forward."""
        if not self._buckets:
            return
        self._reached.add(entry)
        self._schedule.enter(entry)

    def end_backward(self) -> None:
        """Reshards what the backward had gathered; what other forwards keep for their own backwards stays."""
        if not self._buckets:
            return
        if self._reached:
            self._outstanding.subtract(self._reached)
            self._outstanding = +self._outstanding  # without those of which none is left
        else:
            self._outstanding.clear()
        self._reached.clear()
        self._recomputed.clear()
        self._free_except(frozenset().union(*(self._buckets_below(entry) for entry in self._outstanding)))

    def _buckets_below(self, entry: int) -> frozenset[Bucket]:
        """Returns the buckets with parameters of module number ``entry``: equal on all ranks, unlike those in use."""
        if entry not in self._below:
            own = set([*self._by_module, *self._entries][entry].parameters())
            self._below[entry] = frozenset(bucket for bucket in self._buckets if not own.isdisjoint(bucket.params))
        return self._below[entry]

    @property
    def sees_forwards(self) -> bool:
        """Returns whether there are hooks that see each forward begin and end."""
        return bool(self._buckets)

    @property
    def in_forward(self) -> bool:
        """Returns whether a forward of the model is running that is not paused."""
        return bool(self._scopes)

    # -- uses outside the own module ---------------------------------------------------------------------------------

    def _gatherer(self, bucket: Bucket) -> Gatherer:
        def gather(_parameter: nn.Parameter, _together: Sequence[torch.Tensor]) -> bool:
            self._resume()
            if self._scopes:
                self._hold(self._scopes[-1], bucket)
                return True
            if self._in_backward():
                self._schedule.demand(bucket)
                return True
            return False

        return gather

    # -- freeing during backward -------------------------------------------------------------------------------------

    @uncompiled
    def _last_handle_died(self, bucket: Bucket) -> None:
        if self._in_backward():
            self._free_if_done(bucket)

    def gradients_arrived(self, bucket: Bucket) -> None:
        """Called when all gradients of ``bucket`` are copied out."""
        if bucket in self._recomputed:
            self._recomputed[bucket] = True
        self._free_if_done(bucket)

    def _free_if_done(self, bucket: Bucket) -> None:
        """Frees a bucket during backward if no scope, no handle and no missing gradient needs it any more.

        If several forwards wait for their backwards, kept buckets stay until the end of the backward: only then is it
        known, equally on all ranks, which forward still needs them.
        """
        if not bucket.is_sharded or bucket.state is not State.FULL or bucket.users or bucket.live_handles:
            return
        if bucket.layout.trainable and not bucket.gradients_in:
            return
        if bucket.is_kept and self._outstanding.total() > 1:
            return
        if bucket in self._recomputed:
            return  # recomputation has saved plain views; the next unit, or the end of backward, frees the bucket
        bucket.reshard()


def _records_a_graph() -> bool:
    """Returns whether operations are being recorded as a graph.

    That is by ``torch.jit.trace`` or by ``make_fx``, which ``torch.export`` and ``torch.func.linearize`` use.
    """
    if torch.jit.is_tracing():
        return True
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")  # not imported here, since that takes long
    return tracing is not None and tracing.get_proxy_mode() is not None


def _entries(root: nn.Module, units: dict[nn.Module, list[Bucket]]) -> list[nn.Module]:
    """Returns the modules that may be called alone: those above a unit, or that use what another unit gathers."""
    covered: set[nn.Module] = set()
    sharded: set[nn.Parameter] = set()
    for module, buckets in units.items():
        gathered = {parameter for bucket in buckets for parameter in bucket.params}
        sharded |= gathered
        covered |= {inner for inner in module.modules() if gathered.intersection(inner._parameters.values())}
    found = []
    for module in root.modules():
        uses_others = module not in covered and not sharded.isdisjoint(module._parameters.values())
        if module not in units and (uses_others or any(inner in units for inner in module.modules())):
            found.append(module)
    return found


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor in nested tuples, lists, sets, mappings, dataclasses and plain objects, each object once."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
            continue
        if item is None or isinstance(item, (str, bytes, int, float, bool, torch.nn.Module)) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            stack.extend(getattr(item, field.name) for field in dataclasses.fields(item))
        elif hasattr(item, "__dict__") and not isinstance(item, type):
            stack.extend(vars(item).values())
