"""Clips gradients by their global norm, for programs that step their own optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.axes import TENSOR
from deepspeed.comm.base.device import local_device
from deepspeed.comm.job.job import axis_of

_LABEL = "the norm of gradients (clip_grad_norm_)"


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Returns the Euclidean norm of vectors from their Euclidean norms."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Scales gradients in place so that their global norm is at most ``max_norm``.

    Do not use it on parameters of a ZeRO engine: its optimizer clips them (``gradient_clipping``).

    Args:
        parameters: Parameters of any shape; those without ``.grad`` are left out.
        norm_type: The p of the p-norm; ``inf`` for the largest element.
        mpu: Model-parallel unit. The norm is then that of its model-parallel group: parameters with ``model_parallel``
            or ``tensor_model_parallel`` set count on every rank, others only on the first. All ranks of the group must
            call.

    Returns:
        The norm before clipping, a 0-dim tensor.
    """
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    with_grad = [parameter for parameter in tensors if parameter.grad is not None]
    gradients = [parameter.grad for parameter in with_grad if parameter.grad is not None]
    if mpu is None:
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    else:
        # A parameter with one of Megatron's marks is this rank's part of a divided one.
        counted = [
            parameter.grad
            for parameter in with_grad
            if parameter.grad is not None
            and (
                any(getattr(parameter, mark, False) for mark in ("model_parallel", "tensor_model_parallel"))
                or mpu.get_model_parallel_rank() == 0
            )
        ]
        # Ranks without a gradient send from the same kind of device as the others.
        device = (gradients or tensors)[0].device if tensors else local_device()
        norm = _norm_over_group(torch.nn.utils.get_total_norm(counted, norm_type), device, norm_type, mpu)
    torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    return norm


def _norm_over_group(norm: torch.Tensor, device: torch.device, norm_type: float, mpu: Any) -> torch.Tensor:
    channel = axis_of(mpu.get_model_parallel_group(), TENSOR).channel(device)
    norm = norm.to(device=device, dtype=torch.float32).view(1)
    if math.isinf(norm_type):
        return channel.largest(norm, _LABEL)[0]
    return channel.sum(norm**norm_type, _LABEL)[0] ** (1.0 / norm_type)
