"""What a backward starts from: a loss, or outputs whose gradients were computed elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.errors import CallOrderError


def check_loss(loss: Any, gradient: Any) -> None:
    """Raises where ``loss`` is nothing to train by.

    Args:
        loss: What ``engine.backward`` was given.
        gradient: That of ``Tensor.backward``, or None.
    """
    if not isinstance(loss, torch.Tensor):
        raise CallOrderError(
            f"engine.backward: expected the loss as a tensor, found {type(loss).__name__}; pass the element of it that "
            "is the loss, or outputs together with gradients="
        )
    if not loss.requires_grad:
        if not torch.is_grad_enabled():
            # An interrupt that arrives while torch enters such a block leaves gradients off in a notebook.
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
    """Outputs that need a gradient, and the gradients.

    Args:
        outputs: A tensor or a sequence of tensors.
        gradients: As many; None where an output got none.

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
                f"{tuple(gradient.shape)}"
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
