"""Collects costs and times by module while a model runs forward."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.profiling.flops_profiler.counting import OperationCounter


@dataclass
class ModuleProfile:
    """One module of the tree.

    Attributes:
        name: Its name in its parent; empty for the model.
        kind: Its class.
        description: What its ``extra_repr`` says.
        depth: 0 for the model.
        own_params: Elements of its own parameters; a shared parameter counts where it comes first.
        own_flops: Operations that ran in it outside its children.
        own_macs: Multiply-accumulates among them.
        seconds: Time of its forward calls, children included.
        calls: Forward calls.
        children: The modules below it.
    """

    name: str
    kind: str
    description: str
    depth: int
    own_params: int = 0
    own_flops: int = 0
    own_macs: int = 0
    seconds: float = 0.0
    calls: int = 0
    children: list[ModuleProfile] = field(default_factory=list)

    def walk(self) -> Iterator[ModuleProfile]:
        """This module and all below it, in order."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def params(self) -> int:
        """Parameters, children included."""
        return sum(each.own_params for each in self.walk())

    @property
    def flops(self) -> int:
        """Operations, children included."""
        return sum(each.own_flops for each in self.walk())

    @property
    def macs(self) -> int:
        """Multiply-accumulates, children included."""
        return sum(each.own_macs for each in self.walk())

    def clear(self) -> None:
        """Forgets what was measured."""
        for each in self.walk():
            each.own_flops = each.own_macs = each.calls = 0
            each.seconds = 0.0


class ForwardProfile:
    """Watches the forward calls of a model between :meth:`start` and :meth:`stop`.

    Args:
        model: The model.
        ignored: Classes of modules that are not shown; what they do counts for their parents.
    """

    def __init__(self, model: nn.Module, ignored: Collection[type[nn.Module]] = ()) -> None:
        self._ignored = tuple(ignored)
        self._of: dict[nn.Module, ModuleProfile] = {}
        seen: set[nn.Parameter] = set()
        self.root = self._tree(model, "", 0, seen)
        self._open: list[tuple[ModuleProfile, float]] = []
        self._hooks: list[Any] = []
        self._counter: OperationCounter | None = None

    def _tree(self, module: nn.Module, name: str, depth: int, seen: set[nn.Parameter]) -> ModuleProfile:
        node = ModuleProfile(name, type(module).__name__, module.extra_repr(), depth)
        self._of[module] = node
        for parameter in module.parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                # While ZeRO-3 shards it, a parameter is empty and knows its full size as ds_numel.
                node.own_params += int(getattr(parameter, "ds_numel", parameter.numel()))
        for child_name, child in module.named_children():
            if child in self._of:
                continue
            if isinstance(child, self._ignored):
                node.own_params += sum(int(getattr(p, "ds_numel", p.numel())) for p in child.parameters())
                continue
            node.children.append(self._tree(child, child_name, depth + 1, seen))
        return node

    @property
    def is_running(self) -> bool:
        """Whether calls are watched now."""
        return self._counter is not None

    def start(self) -> None:
        """Begins to watch.

        Raises:
            RuntimeError: It runs already.
        """
        if self.is_running:
            raise RuntimeError("the flops profiler is running already; call stop_profile() before start_profile()")
        for module in self._of:
            self._hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        self._counter = OperationCounter(self._record)
        self._counter.__enter__()

    def stop(self) -> None:
        """Ends watching; what was measured stays."""
        if self._counter is None:
            return
        counter, self._counter = self._counter, None
        counter.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._open.clear()

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        get_accelerator().synchronize()
        self._open.append((self._of[module], time.perf_counter()))

    def _leave(self, module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        get_accelerator().synchronize()
        node = self._of[module]
        while self._open:  # an exception may have left calls open inside this one
            entered, started = self._open.pop()
            if entered is node:
                node.seconds += time.perf_counter() - started
                node.calls += 1
                return

    def _record(self, flops: int, macs: int) -> None:
        node = self._open[-1][0] if self._open else self.root
        node.own_flops += flops
        node.own_macs += macs


def first_parameter(model: nn.Module) -> torch.Tensor | None:
    """A parameter that tells the model's device and dtype; None if it has none."""
    return next(model.parameters(), None)
