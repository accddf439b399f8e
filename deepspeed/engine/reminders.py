"""Finds mistakes in a training loop: some raise, others, which would silently train nothing, are logged once."""

from __future__ import annotations

import functools
import logging
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deepspeed.errors import CallOrderError, DeepSpeedError
from deepspeed.logging import log_dist
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.address import address_of
from deepspeed.zero.gather.hooks import tensors_in
from deepspeed.zero.gradient.pending_gradient import PendingGradient

_ABOUT_DTYPES = re.compile(r"\bdtype|scalar type|input type|same type", re.IGNORECASE)
_PATIENCE = 8  # backwards without a step that a program may intend, because it accumulates gradients itself


class MissingStep:
    """Warns once when ``engine.step`` is not called."""

    def __init__(self) -> None:
        self._backwards = 0
        self._is_logged = False

    def backward(self) -> None:
        """Called when a backward begins that leads to a step."""
        self._backwards += 1
        if self._backwards >= _PATIENCE and not self._is_logged:
            self._is_logged = True
            log_dist(
                f"engine.step has not been called in {_PATIENCE} backwards: until it is, gradients are added up and "
                "nothing is trained. Call engine.step() after each engine.backward(loss); it counts which of them end "
                "in an update. The step() of a torch optimizer that was given to initialize updates nothing",
                level=logging.WARNING,
            )

    def step(self) -> None:
        """Called when a step is made."""
        self._backwards = 0


class RowCheck:
    """Compares the batch dimension of the first training batch with the configured micro-batch."""

    def __init__(self, *, is_done: bool = False) -> None:
        self.is_done = is_done  # whether nothing is left to compare

    def compare(self, inputs: Any, micro_batch_size: int) -> None:
        """Warns unless some tensor of ``inputs`` has ``micro_batch_size`` rows (its first dimension)."""
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
    """Returns advice for a program that reads ``attribute`` of an engine without a pipeline; often an empty string."""
    if attribute not in _OF_PIPELINES:
        return ""
    return (
        f". engine.{attribute} is for pipelines: expected a deepspeed.pipe.PipelineModule in initialize(model=...). "
        "For any other model call loss = engine(...), engine.backward(loss), engine.step()"
    )


_looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@functools.cache
def watch_other_optimizers() -> None:
    """Installs a hook that checks the first step of every torch optimizer in this process.

    The hook is not removed with an engine: garbage is collected at any time, also while torch goes through its hooks.
    """
    register_optimizer_step_pre_hook(_look_at)


def _look_at(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
    if optimizer in _looked_at:
        return
    ours = [p for group in optimizer.param_groups for p in group["params"] if _is_trained_by_an_engine(p)]
    if any(isinstance(parameter.grad, PendingGradient) for parameter in ours):
        raise CallOrderError(
            f"{type(optimizer).__name__}.step: {len(ours)} of its parameters are trained by an engine, which updates "
            "them in engine.step(). Give this optimizer to deepspeed.initialize(optimizer=...) instead, or drop it"
        )
    _looked_at.add(optimizer)
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


def check_loss(loss: Any, gradient: Any) -> None:
    """Raises if ``loss`` cannot be backpropagated.

    Raises:
        CallOrderError: It is no tensor of one element that requires a gradient, or gradients are off.
    """
    if not isinstance(loss, torch.Tensor):
        raise CallOrderError(
            f"engine.backward: expected the loss as a tensor, found {type(loss).__name__}; pass the element of it that "
            "is the loss, or outputs together with gradients="
        )
    if not loss.requires_grad:
        if not torch.is_grad_enabled():
            # In a notebook, an interrupt while torch enters such a block leaves gradients off.
            raise CallOrderError(
                "engine.backward: gradients are off (torch.is_grad_enabled() is False), as inside torch.no_grad() or "
                "after an interrupt that arrived as one began. Call engine.backward outside of such a block, or "
                "torch.set_grad_enabled(True) once"
            )
        raise CallOrderError(
            "engine.backward: the loss does not require a gradient, so it depends on no trained parameter. Compute it "
            "from what engine(...) returned, without detach() or torch.no_grad(), and see that some parameter has "
            "requires_grad"
        )
    if loss.numel() != 1 and gradient is None:
        raise CallOrderError(
            f"engine.backward: the loss has shape {tuple(loss.shape)}; expected one element. Reduce it (mean or "
            "sum), or pass gradient= as to Tensor.backward"
        )


def paired_roots(outputs: Any, gradients: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the outputs that need a gradient, and their gradients.

    Raises:
        CallOrderError: Their numbers or shapes differ, or there is nothing to go through.
    """
    tensors, given = _as_sequence(outputs), _as_sequence(gradients)
    if len(tensors) != len(given):
        raise CallOrderError(
            f"engine.backward(gradients=...): expected a gradient (or None) for each of {len(tensors)} tensor(s), "
            f"found {len(given)}"
        )
    for number, (tensor, gradient) in enumerate(zip(tensors, given, strict=True)):
        if gradient is not None and tensor.shape != gradient.shape:
            raise CallOrderError(
                f"engine.backward(gradients=...): tensor {number} has shape {tuple(tensor.shape)}, its gradient "
                f"{tuple(gradient.shape)}; give each gradient the shape of its tensor"
            )
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(tensors, given, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    if not pairs:
        raise CallOrderError(
            "engine.backward(gradients=...): no tensor requires a gradient and was given one, so nothing would be "
            "computed; pass what a forward returned, without detach() or torch.no_grad()"
        )
    return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]


def _as_sequence(value: Any) -> Sequence[Any]:
    return [value] if value is None or isinstance(value, torch.Tensor) else list(value)


def explain_mismatch(
    error: RuntimeError, policy: PrecisionPolicy, inputs: Sequence[Any], named: Mapping[str, Any]
) -> str | None:
    """Returns a message for a forward that failed because of its inputs' dtype; None if the cause is another one."""
    dtype = policy.compute_dtype
    if dtype is None or isinstance(error, DeepSpeedError) or not _ABOUT_DTYPES.search(str(error)):
        return None
    found = [
        f"argument {name!r} in {other}"
        for name, value in (*enumerate(inputs), *named.items())
        for other in {t.dtype for t in tensors_in(value) if t.is_floating_point() and t.dtype != dtype}
    ]
    if not found:
        return None
    section = policy.name
    return (
        f"engine.forward: {section}.enabled makes the model compute in {dtype}, but it was given {', '.join(found)}, "
        f"which torch refuses ({str(error).splitlines()[0]}). Cast it (x.to({dtype})), let the engine cast every "
        f"floating input ({section}.auto_cast: true), or compute under torch.autocast (torch_autocast.enabled: true "
        f"instead of {section})"
    )
