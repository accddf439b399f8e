"""Mistakes in a training loop that raise nothing and train nothing; each is logged once."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deepspeed.logging import log_dist
from deepspeed.zero.address import address_of
from deepspeed.zero.gather.hooks import tensors_in

_PATIENCE = 8  # backwards of one update by a program that adds up gradients of its own accord


class MissingStep:
    """Warns once when ``engine.step`` is not called."""

    def __init__(self) -> None:
        self._backwards = 0
        self._is_logged = False

    def backward(self) -> None:
        """A backward that leads to a step begins."""
        self._backwards += 1
        if self._backwards >= _PATIENCE and not self._is_logged:
            self._is_logged = True
            log_dist(
                f"engine.step has not been called in {_PATIENCE} backwards: until it is, gradients are added up and "
                "nothing is trained. Call engine.step() after each engine.backward(loss); it knows which of them end "
                "in an update. The step() of a torch optimizer that was given to initialize updates nothing",
                level=logging.WARNING,
            )

    def step(self) -> None:
        """A step was called."""
        self._backwards = 0


class RowCheck:
    """Compares the rows of the first training batch with the configured micro-batch.

    Attributes:
        is_done: Whether a batch was compared.
    """

    def __init__(self) -> None:
        self.is_done = False

    def compare(self, inputs: Any, micro_batch_size: int) -> None:
        """Warns unless some tensor of ``inputs`` has ``micro_batch_size`` rows (its first dimension).

        Args:
            inputs: Arguments of a forward, in any nesting.
            micro_batch_size: What the configuration says.
        """
        rows = [tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim() > 0]
        self.is_done = bool(rows)
        if rows and micro_batch_size not in rows:
            found = " or ".join(map(str, dict.fromkeys(rows)))
            log_dist(
                f"train_micro_batch_size_per_gpu={micro_batch_size}: expected inputs of {micro_batch_size} row(s), "
                f"found {found} in the first training batch. The update is right, but samples per second, "
                f"global_samples and schedules by samples count {micro_batch_size} per micro-batch. Change the setting "
                "or the loader's batch_size",
                level=logging.WARNING,
            )


_OF_PIPELINES = ("train_batch", "eval_batch", "set_dataiterator", "set_dataloader", "set_batch_fn")


def hint_for(attribute: str) -> str:
    """Returns what to do where a program asks an engine without a pipeline for ``attribute``; often nothing."""
    if attribute not in _OF_PIPELINES:
        return ""
    return (
        f". engine.{attribute} is for pipelines: expected a deepspeed.pipe.PipelineModule in initialize(model=...). "
        "For any other model call loss = engine(...), engine.backward(loss), engine.step()"
    )


_looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_hooks: list[Any] = []


def watch_other_optimizers() -> None:
    """Checks the first step of every torch optimizer in this process from now on."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_look_at))


def _look_at(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
    if optimizer in _looked_at:
        return
    _looked_at.add(optimizer)
    ours = [p for group in optimizer.param_groups for p in group["params"] if _is_trained_by_an_engine(p)]
    if ours and all(parameter.grad is None for parameter in ours):
        log_dist(
            f"{type(optimizer).__name__}.step: {len(ours)} of its parameters are trained by an engine, which takes "
            "their gradients, so this step does nothing to them. Give this optimizer to "
            "deepspeed.initialize(optimizer=...) instead, or drop it, and call engine.step()",
            level=logging.WARNING,
        )


def _is_trained_by_an_engine(parameter: torch.Tensor) -> bool:
    address = address_of(parameter)
    return address is not None and address.bucket.is_trained and address.bucket.owner.reducer is not None
