"""Adam on torch's fused kernels, and the base class of both Adam optimizers, which selects the weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import ParamsT
from typing_extensions import override

from deepspeed.ops.base import ClearsGradients, ElementwiseOptimizer
from deepspeed.ops.flat import AdamRule, UpdateRule


class AdamOptimizer(ElementwiseOptimizer):
    """Adam or AdamW, depending on ``adam_w_mode``.

    The groups carry torch's key ``decoupled_weight_decay`` with the same value, so that torch's classes understand
    our state dictionaries; a group or state dictionary with another value does not change ours.
    """

    _pickled_attributes = (*ElementwiseOptimizer._pickled_attributes, "adam_w_mode")
    adam_w_mode: bool = True

    @property
    def rule(self) -> UpdateRule:
        """Returns Adam's arithmetic with this optimizer's kind of weight decay."""
        return AdamRule(decoupled=bool(self.adam_w_mode))

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._mark_groups()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._mark_groups()

    def _mark_groups(self) -> None:
        for group in self.param_groups:
            group["decoupled_weight_decay"] = bool(self.adam_w_mode)


class FusedAdam(AdamOptimizer, ClearsGradients):
    """Adam or AdamW, one kernel per list of parameters, on any device for which torch has the kernel.

    State (``exp_avg``, ``exp_avg_sq``, ``step``) has the names and meaning of ``torch.optim.AdamW``, so that each class
    loads the state dictionaries of the other. Results equal torch's with ``fused=True``.

    Args:
        params: Parameters or group dictionaries; groups may carry keys of other optimizers.
        bias_correction: Correct the moments for their start at zero.
        adam_w_mode: Decoupled weight decay (AdamW); False adds it to the gradient (Adam).
        amsgrad: Not available.
        set_grad_none: ``zero_grad()`` drops gradients instead of zeroing them.

    Raises:
        ValueError: ``amsgrad`` is requested, or a number is out of range.
    """

    _pickled_attributes = (*AdamOptimizer._pickled_attributes, "set_grad_none")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        numbers = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params,
            {"lr": lr, "bias_correction": bias_correction, **numbers},
            amsgrad=amsgrad,
            adam_w_mode=adam_w_mode,
            set_grad_none=set_grad_none,
        )

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """Updates every parameter with a gradient. All but ``closure`` exist for compatibility and must be None.

        Raises:
            RuntimeError: An argument that must be None is given.
        """
        unsupported = {
            "grads": grads,
            "output_params": output_params,
            "scale": scale,
            "grad_norms": grad_norms,
            "grad_scaler": grad_scaler,
        }
        passed = [name for name, value in unsupported.items() if value is not None]
        if passed:
            raise RuntimeError(
                f"FusedAdam.step takes gradients from param.grad, unscaled; {', '.join(passed)} has no effect here. "
                "Unscale before the step (torch.amp.GradScaler.step(optimizer) or engine.step() do it)"
            )
        return super().step(closure)
