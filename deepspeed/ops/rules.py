"""The arithmetic of the elementwise optimizers, one rule each, on torch's own kernels.

A rule knows which state an element has and how one step changes it; it knows nothing of parameters, runs or chunks.
Hyperparameters are read from the param group at every step, so that schedulers and users may change them.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.ops.chunks import Kernel, scratch

#: The step count for which every bias correction is exactly 1: beta ** inf is 0.
_UNCORRECTED = math.inf


class UpdateRule(Protocol):
    """An elementwise update rule."""

    @property
    def counts_steps(self) -> bool:
        """Returns whether the rule needs the number of steps taken."""
        ...

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        """Per-element state: name to the value it starts with."""
        ...

    def kernel(self, group: dict[str, Any], step: float | Tensor, device: torch.device) -> Kernel:
        """Returns the arithmetic of update number ``step`` (1 for the first) with the hyperparameters of ``group``.

        Args:
            group: Hyperparameters.
            step: A number; a scalar tensor only where it lives on an accelerator, so that the host does not wait for
                it.
            device: Where the update runs.
        """
        ...

    def runs_lists_at_once(self, device: torch.device) -> bool:
        """Returns whether the kernel handles many tensors in one call without temporary copies of all of them."""
        ...


class AdamRule:
    """Adam and AdamW: `Kingma and Ba <https://arxiv.org/abs/1412.6980>`_, `Loshchilov and Hutter
    <https://arxiv.org/abs/1711.05101>`_.

    Args:
        decoupled: Weight decay apart from the gradient (AdamW); None reads ``decoupled_weight_decay`` of the group.
    """  # noqa: D205 - the title holds its two references

    counts_steps = True

    def __init__(self, decoupled: bool | None = None) -> None:
        self._decoupled = decoupled

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        """First and second moment, from zero."""
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def runs_lists_at_once(self, device: torch.device) -> bool:
        """Returns True: the kernel is fused."""
        return True

    def kernel(self, group: dict[str, Any], step: float | Tensor, device: torch.device) -> Kernel:
        """Returns the arithmetic of update number ``step`` with the hyperparameters of ``group``.

        Args:
            group: Hyperparameters.
            step: 1 for the first update; a scalar tensor only where it lives on an accelerator.
            device: Where the update runs.
        """
        decoupled = group.get("decoupled_weight_decay", False) if self._decoupled is None else self._decoupled
        fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        if not group.get("bias_correction", True):
            step = _UNCORRECTED
        step_tensor = _step_tensor(step, device)
        beta1, beta2 = (_number(beta) for beta in group["betas"])
        lr = group["lr"]
        if not (isinstance(lr, Tensor) and lr.device == device and device.type != "cpu"):
            lr = _number(lr)
        weight_decay, eps = float(group["weight_decay"]), float(group["eps"])
        maximize = bool(group.get("maximize", False))

        def update(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            fused(
                params,
                grads,
                states[0],
                states[1],
                [],
                [step_tensor] * len(params),
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                eps=eps,
                amsgrad=False,
                maximize=maximize,
            )

        return update


class SGDRule:
    """Stochastic gradient descent with momentum, as torch's (dampening 0, where a buffer may start from zero)."""

    counts_steps = False

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        """Returns a momentum buffer, if there is momentum."""
        return {"momentum_buffer": 0.0} if group.get("momentum", 0) else {}

    def runs_lists_at_once(self, device: torch.device) -> bool:
        """Returns True: the kernel is fused."""
        return True

    def kernel(self, group: dict[str, Any], step: float | Tensor, device: torch.device) -> Kernel:
        """Returns the arithmetic of update number ``step`` with the hyperparameters of ``group``.

        Args:
            group: Hyperparameters.
            step: 1 for the first update; a scalar tensor only where it lives on an accelerator.
            device: Where the update runs.
        """
        lr = group["lr"]
        if not (isinstance(lr, Tensor) and lr.device == device and device.type != "cpu"):
            lr = _number(lr)

        def update(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            torch._fused_sgd_(
                params,
                grads,
                states[0] if states else [],
                weight_decay=float(group["weight_decay"]),
                momentum=float(group["momentum"]),
                lr=lr,
                dampening=0.0,
                nesterov=bool(group["nesterov"]),
                maximize=bool(group.get("maximize", False)),
                is_first_step=False,
            )

        return update


class AdagradRule:
    """Adagrad: `Duchi et al. <https://jmlr.org/papers/v12/duchi11a.html>`_, as torch's."""

    counts_steps = True

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        """Returns the sum of squared gradients."""
        return {"sum": float(group.get("initial_accumulator_value", 0.0))}

    def runs_lists_at_once(self, device: torch.device) -> bool:
        """Returns whether the kernel is fused: on the CPU."""
        return device.type == "cpu"

    def kernel(self, group: dict[str, Any], step: float | Tensor, device: torch.device) -> Kernel:
        """Returns the arithmetic of update number ``step`` with the hyperparameters of ``group``.

        Args:
            group: Hyperparameters.
            step: 1 for the first update; a scalar tensor only where it lives on an accelerator.
            device: Where the update runs.
        """
        lr, lr_decay = _number(group["lr"]), float(group.get("lr_decay", 0.0))
        weight_decay, eps = float(group["weight_decay"]), float(group["eps"])
        maximize = bool(group.get("maximize", False))

        def update_fused(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            torch._fused_adagrad_(
                params,
                grads,
                states[0],
                [step_tensor] * len(params),
                lr=lr,
                lr_decay=lr_decay,
                weight_decay=weight_decay,
                eps=eps,
                maximize=maximize,
            )

        # Not every supported torch has the fused kernel on accelerators.
        def update_plain(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            rate = lr if not lr_decay else lr / (1 + (float(step) - 1) * lr_decay)
            for param, grad, total in zip(params, grads, states[0], strict=True):
                descent = -grad if maximize else grad
                if weight_decay:
                    descent = descent.add(param, alpha=weight_decay)
                total.addcmul_(descent, descent)
                param.addcdiv_(descent, total.sqrt().add_(eps), value=-rate)

        if device.type != "cpu":
            return update_plain
        step_tensor = _step_tensor(step, device)
        return update_fused


class LionRule:
    """Lion, the evolved sign momentum: `Chen et al. <https://arxiv.org/abs/2302.06675>`_, algorithm 2."""

    counts_steps = False

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        """One momentum."""
        return {"exp_avg": 0.0}

    def runs_lists_at_once(self, device: torch.device) -> bool:
        """Returns False: the interpolated direction would need a temporary copy of every tensor."""
        return False

    def kernel(self, group: dict[str, Any], step: float | Tensor, device: torch.device) -> Kernel:
        """Returns the arithmetic of update number ``step`` with the hyperparameters of ``group``.

        Args:
            group: Hyperparameters.
            step: 1 for the first update; a scalar tensor only where it lives on an accelerator.
            device: Where the update runs.
        """
        lr = _number(group["lr"])
        beta1, beta2 = (_number(beta) for beta in group["betas"])
        shrink = 1.0 - lr * float(group["weight_decay"])
        rate = lr if group.get("maximize", False) else -lr

        def update(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            for param, grad, exp_avg in zip(params, grads, states[0], strict=True):
                direction = scratch("lion", grad.numel(), grad.dtype, grad.device)
                torch.lerp(exp_avg, grad, 1.0 - beta1, out=direction)
                if shrink != 1.0:
                    param.mul_(shrink)
                param.add_(direction.sign_(), alpha=rate)
                exp_avg.lerp_(grad, 1.0 - beta2)

        return update


def _number(value: float | Tensor) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


def _step_tensor(step: float | Tensor, device: torch.device) -> Tensor:
    """Returns the step count where torch's fused kernels want it: fp32, 0-dim, on the device of the parameters."""
    if isinstance(step, Tensor) and step.device == device:
        return step
    return torch.full((), float(step), dtype=torch.float32, device=device)
