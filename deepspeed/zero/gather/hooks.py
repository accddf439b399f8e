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
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
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
from deepspeed.zero.passes import ModelPhase, Pass, PassTracker, Scope


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
    """

    def __init__(
        self,
        root: nn.Module,
        units: list[tuple[nn.Module, list[Bucket]]],
        buckets: list[Bucket],
        schedule: GatherSchedule,
        passes: PassTracker,
    ) -> None:
        self._schedule = schedule
        self._passes = passes
        self._buckets = buckets
        self._by_index = {bucket.index: bucket for bucket in buckets}
        self._entered: list[bool] = []  # for every running forward of an entry: whether it opened a scope
        self._below: dict[int, frozenset[Bucket]] = {}
        self._saved = SavedTensorHooks(buckets, schedule, passes)
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
        # torch.jit.trace, or make_fx (torch.export and torch.func.linearize use it), whose import would take long
        tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
        if torch.jit.is_tracing() or (tracing is not None and tracing.get_proxy_mode() is not None):
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
        if not self._passes.scopes:
            self.refuse_transforms()
        scope = Scope(entry, buckets)
        now = self._open(scope)
        if len(now.scopes) == 1:
            scope.pushed_hooks = self._saved.push()
        scope.pushed_guard = not scope.pushed_hooks and self._saved.push_guard()
        if now.phase is ModelPhase.BACKWARD:
            # What an earlier unit's recomputation gathered is freed when the next one begins: its gradients may have
            # been outstanding at its end.
            for bucket, is_settled in list(now.recomputed.items()):
                if is_settled and bucket not in buckets and bucket.users == 0:
                    del now.recomputed[bucket]
                    self._passes.free_if_done(bucket)
        for bucket in buckets:
            self._hold(scope, bucket)

    def _open(self, scope: Scope) -> Pass:
        now = self._passes.current
        if now is None:
            now = self._passes.begin(
                ModelPhase.FORWARD if torch.is_grad_enabled() else ModelPhase.EVALUATION, scope.entry
            )
            self._schedule.begin(now, self._buckets_below(scope.entry))
            scope.opened_pass = True
        now.scopes.append(scope)
        return now

    def _enter_entry(self, entry: int, inputs: Any) -> None:
        self._entered.append(not self._passes.scopes and not self._passes.paused)
        if self._entered[-1]:
            self._enter(entry, [], inputs)

    def _leave_entry(self, outputs: Any) -> None:
        if self._entered and self._entered.pop():  # empty after an exception or a whole step inside this forward
            self._leave(outputs)

    def _hold(self, scope: Scope, bucket: Bucket) -> None:
        self._schedule.demand(bucket)
        bucket.users += 1
        scope.held.append(bucket)

    def _leave(self, outputs: Any) -> None:
        now = self._passes.current
        if now is None or not now.scopes:
            # The forward was paused until its end, or an exception inside it has closed its scope.
            if self._passes.paused:
                self._pop_hooks(self._passes.paused.pop())
            return
        bare = not now.scopes[0].pushed_hooks  # hooks of other libraries save plain views
        scope = now.scopes.pop()
        is_training = scope.opened_pass and now.phase is ModelPhase.FORWARD
        try:
            self._close(scope, now, bare)
            if is_training:
                self._passes.outstanding[scope.entry] += 1
                self.watch(outputs, scope.entry)
        finally:  # diverging ranks raise above; the hooks must not outlive this forward
            self._pop_hooks(scope)

    def _pop_hooks(self, scope: Scope) -> None:
        """Removes the saved-tensor hooks that a scope has installed."""
        if scope.pushed_hooks:
            self._saved.pop()
        if scope.pushed_guard:
            self._saved.pop_guard()

    def _close(self, scope: Scope, now: Pass, bare: bool) -> None:
        for bucket in scope.held:
            bucket.users -= 1
            if bucket.users or bucket.state is not State.FULL:
                continue
            if now.phase is not ModelPhase.BACKWARD:
                # Also what ran under no_grad: ranks that skipped it keep it, and ranks must keep the same.
                self._keep_or_free(bucket, now)
            elif bare:
                is_settled = bucket.gradients_in or not bucket.layout.trainable
                now.recomputed[bucket] = is_settled or now.recomputed.get(bucket, False)
            else:
                self._passes.free_if_done(bucket)
        scope.held.clear()
        if scope.opened_pass:
            scope.opened_pass = False
            self._schedule.end(now)
            self._passes.end()
            for bucket in self._full():  # what this rank gathered only for other ranks, unless these keep it
                self._keep_or_free(bucket, now)

    def _keep_or_free(self, bucket: Bucket, now: Pass) -> None:
        """Reshards a bucket that no forward uses any more, unless its backward is near."""
        if bucket.users or bucket.is_kept:
            return
        if now.phase is ModelPhase.FORWARD and self._schedule.stays_after_forward(bucket):
            bucket.is_kept = True
        else:
            bucket.reshard()

    def _full(self) -> list[Bucket]:
        return [self._by_index[index] for index in self._schedule.full]

    def pause(self) -> None:
        """Pauses the running forwards for a backward or an update inside them. All ranks must do so.

        The saved-tensor hooks stay: a later forward of the same step needs them, and nothing else is harmed by them.
        """
        now = self._passes.current
        if now is None or now.phase is ModelPhase.BACKWARD:
            return
        while now.scopes:
            scope = now.scopes.pop()
            self._close(scope, now, bare=False)
            self._passes.paused.insert(0, scope)

    def _resume(self) -> None:
        """Resumes paused forwards when the next gather is part of them."""
        if self._passes.current is not None:
            return
        while self._passes.paused:
            scope = self._passes.paused.pop(0)
            self._open(scope)
            for bucket in scope.buckets:
                self._hold(scope, bucket)

    def abandon(self) -> None:
        """Closes every scope and frees every bucket after an exception."""
        for scopes in (self._passes.scopes, self._passes.paused):
            while scopes:
                self._pop_hooks(scopes.pop())
        self._entered.clear()
        for bucket in self._buckets:
            bucket.users = bucket.pins
        self.free_all()

    def free_all(self) -> None:
        """Reshards every gathered bucket that is not in use."""
        if (now := self._passes.current) is not None:
            now.recomputed.clear()
        self._passes.outstanding.clear()
        self._free_except(frozenset())

    def _free_except(self, kept: Set[Bucket]) -> None:
        for bucket in self._full():
            if bucket.users == 0 and not (bucket.is_kept and bucket in kept):
                bucket.reshard()

    def watch(self, outputs: Any, entry: int = 0) -> None:
        """Hooks the outputs of a training forward, so that a backward through them is opened, whoever calls it.

        So its entry is known before the first weight is needed.
        """

        def reached(_gradient: torch.Tensor) -> None:
            self._passes.open_backward()
            now = self._passes.current
            if self._buckets and now is not None and now.phase is ModelPhase.BACKWARD:
                now.reached.add(entry)
                self._schedule.enter(now, entry)

        for tensor in tensors_in(outputs):
            if tensor.requires_grad and not tensor.is_leaf:  # on a parameter, each forward would add another hook
                tensor.register_hook(reached)

    def end_backward(self, now: Pass) -> None:
        """Reshards what a backward had gathered; what other forwards keep for their own backwards stays."""
        if not self._buckets:
            return
        outstanding = self._passes.outstanding
        for entry in now.reached or list(outstanding):
            if now.reached and outstanding[entry] > 1:
                outstanding[entry] -= 1
            else:
                outstanding.pop(entry, None)
        now.recomputed.clear()
        self._free_except(frozenset().union(*(self._buckets_below(entry) for entry in outstanding)))

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

    # -- uses outside the own module ---------------------------------------------------------------------------------

    def _gatherer(self, bucket: Bucket) -> Gatherer:
        def gather(_parameter: nn.Parameter, _together: Sequence[torch.Tensor]) -> bool:
            self._resume()
            now = self._passes.current
            if now is None:
                return False
            if now.scopes:
                self._hold(now.scopes[-1], bucket)
                return True
            if now.phase is ModelPhase.BACKWARD:
                self._schedule.demand(bucket)
                return True
            return False

        return gather


def _entries(root: nn.Module, units: dict[nn.Module, list[Bucket]]) -> list[nn.Module]:
    """Returns the modules that may be called alone: those above a unit, or that use what another unit gathers."""
    covered: set[nn.Module] = set()
    sharded: set[nn.Parameter] = set()
    for module, buckets in units.items():
        gathered = {parameter for bucket in buckets for parameter in bucket.params}
        sharded |= gathered
        covered |= {inner for inner in module.modules() if gathered.intersection(inner._parameters.values())}
    entries = []
    for module in root.modules():
        uses_others = module not in covered and not sharded.isdisjoint(module._parameters.values())
        if module not in units and (uses_others or any(inner in units for inner in module.modules())):
            entries.append(module)
    return entries


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
