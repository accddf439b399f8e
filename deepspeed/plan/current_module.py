"""Where a simulated step is, by phase and module: for what is counted there, and for errors of the model's own code."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.plan import decoder
from deepspeed.plan.memory import MemoryCount, Moment
from deepspeed.zero.gather.outputs import tensors_in


class CurrentModule:
    """Keeps :attr:`MemoryCount.moment` up to date.

    Args:
        model: What runs; it is not touched.
        count: Whose moment that is.
    """

    def __init__(self, model: nn.Module, count: MemoryCount) -> None:
        self._model = model
        self._count = count
        self._names = {module: name for name, module in model.named_modules()}
        self._stack: list[str] = []

    def enter(self, phase: str, module: str = "") -> None:
        """A phase begins, or a module in it."""
        self._count.moment = Moment(phase, module)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, modules say that they begin and end."""
        before = nn.modules.module.register_module_forward_pre_hook(self._before)
        after = nn.modules.module.register_module_forward_hook(self._after, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @contextmanager
    def own_errors_named(self, circumstances: str) -> Iterator[None]:
        """Turns an error of the model's own code into one that says under which circumstances it came.

        Raises:
            DeepSpeedConfigError: The model's own code raised inside the block.
        """
        try:
            yield
        except DeepSpeedError:
            raise
        except Exception as error:
            place = _own_place(error)
            if place is None:
                raise
            raise DeepSpeedConfigError(
                f"plan: {self._count.moment.phase or 'the step'} of {type(self._model).__name__} failed at "
                f"{place}: {type(error).__name__}: {error} ({circumstances}). Choose sizes that the model allows, "
                "and keep what depends on values (masks that select, .tolist()) out of forward"
            ) from error

    def _before(self, module: nn.Module, _args: Any) -> None:
        name = self._names.get(module)
        if name is not None:
            self._stack.append(name)
            self.enter(self._count.moment.phase, name)

    def _after(self, module: nn.Module, _args: Any, output: Any) -> None:
        name = self._names.get(module)
        if name is None or not self._stack:
            return
        self._stack.pop()
        self.enter(self._count.moment.phase, self._stack[-1] if self._stack else "")
        if self._count.moment.phase == "forward" and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _gradient, name=name: self.enter("backward", name))


def _own_place(error: Exception) -> str | None:
    """The innermost line of the model's code in a traceback; None if all of it is torch's and this package's."""
    ours = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep, "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = os.path.basename(frame.filename)
        is_model = frame.filename == decoder.__file__ or not frame.filename.startswith(ours)
        if is_model and name != "contextlib.py":
            return f"{name}, line {frame.lineno}"
    return None
