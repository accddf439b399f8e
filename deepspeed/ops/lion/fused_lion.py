"""Lion on any device, and Lion for parameters in host memory."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from deepspeed.ops.base import ClearsGradients, ElementwiseOptimizer
from deepspeed.ops.flat import LionRule


class FusedLion(ClearsGradients):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay.

    One momentum per element (``exp_avg``) is all the state there is. From `Symbolic Discovery of Optimization
    Algorithms <https://arxiv.org/abs/2302.06675>`_.

    Args:
        lr: Step size, usually 3 to 10 times smaller than Adam's; a tensor is allowed.
        betas: Interpolation of the direction, and decay of the momentum.
        set_grad_none: ``zero_grad()`` drops gradients instead of zeroing them.

    Raises:
        ValueError: A number is out of range.
    """

    _rule = LionRule()

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, numbers, set_grad_none=set_grad_none)


class DeepSpeedCPULion(ElementwiseOptimizer):
    """Lion for offloaded parameters (on any device); the momentum is fp32 unless ``fp32_optimizer_states`` is False.

    Raises:
        ValueError: A number is out of range.
    """

    _rule = LionRule()

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(model_params, numbers, fp32_optimizer_states=fp32_optimizer_states)
