"""1-bit Adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from deepspeed.ops.base import ElementwiseOptimizer
from deepspeed.ops.flat import AdamRule, Kernel, UpdateRule, scratch
from deepspeed.ops.onebit.phases import Phase, PhaseCheck, frozen_root, refuse_step


class FrozenAdamRule(UpdateRule):
    """The step of 1-bit Adam after its warm-up of ``frozen_at`` updates; the gradient argument holds the momentum."""

    starts = AdamRule.starts  # not fused: the denominator would need a temporary copy of every tensor

    def __init__(self, frozen_at: int) -> None:
        self._frozen_at = frozen_at

    @override
    def kernel(self, group: dict[str, Any], step: float | Tensor, device: torch.device) -> Kernel:
        lr = float(group["lr"])
        eps, weight_decay = float(group["eps"]), float(group["weight_decay"])
        first, second = 1.0, 1.0
        if group["bias_correction"]:
            beta1, beta2 = (float(beta) for beta in group["betas"])
            count = float(step)
            first, second = 1 - beta1**count, 1 - beta2 ** min(count, self._frozen_at)

        def update(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            for param, momentum, exp_avg, exp_avg_sq in zip(params, grads, *states, strict=True):
                exp_avg.copy_(momentum)
                denominator = scratch("one-bit", param.numel(), param.dtype, param.device)
                frozen_root(exp_avg_sq, out=denominator)
                if second != 1.0:
                    denominator.div_(second**0.5)
                denominator.add_(eps)
                if weight_decay:
                    param.mul_(1 - lr * weight_decay)
                param.addcdiv_(exp_avg, denominator, value=-lr / first)

        return update


class OneBitAdam(ElementwiseOptimizer):
    """Adam that exchanges its momentum with one bit per element once its variance is stable.

    `1-bit Adam <https://arxiv.org/abs/2102.02888>`_. The first ``freeze_step`` updates are AdamW's. Afterwards the
    variance is frozen, each rank adds its own gradient to the momentum, and a compressed all-reduce averages these
    momenta (``comm.codecs.one_bit``). Weight decay is decoupled. Elements without a gradient in the warm-up are not
    updated afterwards. It needs an engine to step.

    Args:
        params: Parameters or group dictionaries; a group may have ``exp_avg_mask``, 0 for elements whose momentum stays
            0 (such as rows that never get a gradient; a sign cannot represent zero), in the shape of its one parameter
            or flat over all of them.
        deepspeed: Ignored; accepted for compatibility with upstream.
        freeze_step: Updates of the warm-up, 15 to 25 % of all.
        bias_correction: Correct the moments for their start at zero; the paper does not.
        eps_inside_sqrt: Must be False.
        max_grad_norm: Must be 0; ``gradient_clipping`` clips, by the norm of the mean gradient.
        amsgrad: Must be False.
        cuda_aware: Ignored: messages are tensors of the process group's backend.
        comm_backend_name: Ignored: the engine provides the process group.
        precondition: Divide the momentum by the root of the variance before sending, and multiply after receiving, so
            that compression errors are equally large for all weights. Also clamp the sum of what is sent and the
            error-feedback residual to the largest update of Adam (``phases.largest_update``). Otherwise an element
            whose frozen variance is too small for later gradients would move too far and raise the scale of all
            others. The clamped part is lost, as with gradient clipping. False: send the plain momentum, as in the
            paper; one scale for elements of all sizes then gives large errors where the frozen variance is small.

    Raises:
        ValueError: A number is out of range, or an argument that must be False or 0 is not.
    """

    _ds_driver = "deepspeed.zero.onebit.momentum:MomentumExchange"
    _ds_features = ("deepspeed.ops.onebit.feature",)
    _keeps_own_states = True
    _pickled_attributes = (*ElementwiseOptimizer._pickled_attributes, "freeze_step", "precondition", "phase")
    freeze_step: int
    precondition: bool
    phase: Phase

    def __init__(
        self,
        params: ParamsT,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        precondition: bool = True,
    ) -> None:
        check_family(self, eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, freeze_step=freeze_step)
        self.reminder = PhaseCheck(self, "1-bit Adam", freeze_step)
        numbers = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params,
            {"lr": lr, "bias_correction": bias_correction, **numbers},
            amsgrad=amsgrad,
            freeze_step=freeze_step,
            precondition=precondition,
            phase=Phase.WARM_UP,
        )

    @property
    def rule(self) -> UpdateRule:
        """Returns AdamW's arithmetic, or that of the second phase."""
        return AdamRule(decoupled=True) if self.phase is Phase.WARM_UP else FrozenAdamRule(self.freeze_step)

    def begin_update(self, before: int) -> None:
        """Prepares the phase of the next update."""
        self.phase = Phase.WARM_UP if before < self.freeze_step else Phase.MOMENTUM

    def coefficient(self, name: str) -> float:
        """Returns the factor on the momentum of a tensor before it is sent; it is divided by it afterwards."""
        return 1.0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises, since the exchange with the other ranks is part of ``engine.step``."""
        refuse_step(self)


def check_family(optimizer: object, *, eps_inside_sqrt: bool, max_grad_norm: float, freeze_step: int) -> None:
    """Raises for arguments that upstream accepts but ignores, and for a warm-up without updates.

    Raises:
        ValueError: ``eps_inside_sqrt`` or ``max_grad_norm`` is set, or ``freeze_step`` is below 1.
    """
    name = type(optimizer).__name__
    if eps_inside_sqrt:
        raise ValueError(f"{name}: expected eps_inside_sqrt=False, found True, which has no effect; leave it out")
    if max_grad_norm:
        raise ValueError(
            f"{name} does not clip (max_grad_norm={max_grad_norm}); set gradient_clipping in the config, which clips "
            "by the norm of the mean gradient"
        )
    if freeze_step < 1:
        raise ValueError(f"{name}: freeze_step={freeze_step}: expected 1 or more updates of warm-up")
