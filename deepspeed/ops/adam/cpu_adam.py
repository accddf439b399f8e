"""Adam for parameters in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from deepspeed.ops.adam.fused_adam import AdamOptimizer
from deepspeed.ops.base import evaluate


class DeepSpeedCPUAdam(AdamOptimizer):
    """Adam or AdamW with fp32 state, for offloaded parameters (it works on any device).

    Args:
        model_params: Parameters or group dictionaries; groups may carry keys of other optimizers.
        bias_correction: Correct the moments for their start at zero.
        amsgrad: Not available.
        adamw_mode: Decoupled weight decay (AdamW); False adds it to the gradient (Adam).
        fp32_optimizer_states: Keep the moments of 16-bit parameters in fp32; False keeps the parameter's dtype.

    Raises:
        ValueError: ``amsgrad`` is requested, or a number is out of range.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            model_params,
            {**numbers, "bias_correction": bias_correction},
            amsgrad=amsgrad,
            adam_w_mode=adamw_mode,
            fp32_optimizer_states=fp32_optimizer_states,
        )

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Updates only the param group with number ``subgroup_id``; returns what ``closure`` returned, or None."""
        loss = evaluate(closure)
        self._update_group(self._group(subgroup_id))
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Undoes the latest step of one param group, up to rounding.

        The gradients and hyperparameters of that step must be unchanged, because the update is inverted; no copy is
        kept.

        Raises:
            RuntimeError: No step has been taken, or a beta of 0 erased the previous moment.
        """
        loss = evaluate(closure)
        group = self._group(subgroup_id)
        if 0 in group["betas"]:
            raise RuntimeError(
                f"param group {subgroup_id}: expected betas above 0, whose step can be inverted, found "
                f"{group['betas']}; keep a copy of the state instead"
            )
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state.get(param, {})
            if not state or float(state["step"]) < 1:
                raise RuntimeError(
                    f"param group {subgroup_id}: expected at least one step to roll back, found none; call step first"
                )
            _undo(group, param, param.grad, state, decoupled=bool(self.adam_w_mode))
        return loss

    def _group(self, subgroup_id: int) -> dict[str, Any]:
        if not 0 <= subgroup_id < len(self.param_groups):
            most = len(self.param_groups) - 1
            raise IndexError(f"subgroup_id {subgroup_id}: expected 0 to {most}; pass the number of a param group")
        return self.param_groups[subgroup_id]


def _undo(group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any], *, decoupled: bool) -> None:
    """Inverts one Adam step: restores parameter, moments and step count, in place."""
    beta1, beta2 = group["betas"]
    lr, weight_decay, step = float(group["lr"]), float(group["weight_decay"]), float(state["step"])
    corrections = (1 - beta1**step, 1 - beta2**step) if group.get("bias_correction", True) else (1.0, 1.0)
    exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    work = torch.promote_types(param.dtype, torch.float32)
    denominator = (exp_avg_sq.to(work) / corrections[1]).sqrt_().add_(group["eps"])
    before = param.to(work).addcdiv(exp_avg.to(work), denominator, value=lr / corrections[0])
    descent = -grad.to(work) if group.get("maximize") else grad.to(work)
    if decoupled:
        before.div_(1 - lr * weight_decay)
    elif weight_decay:
        descent = descent.add(before, alpha=weight_decay)
    exp_avg.copy_(exp_avg.to(work).sub_(descent, alpha=1 - beta1).div_(beta1))
    exp_avg_sq.copy_(exp_avg_sq.to(work).addcmul_(descent, descent, value=beta2 - 1).div_(beta2).clamp_(min=0))
    param.copy_(before)
    state["step"] -= 1
