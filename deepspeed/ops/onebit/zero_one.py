"""0/1 Adam."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from deepspeed.ops.base import ElementwiseOptimizer
from deepspeed.ops.flat import AdamRule, Kernel, UpdateRule, scratch
from deepspeed.ops.onebit.adam import check_family
from deepspeed.ops.onebit.phases import Phase, PhaseCheck, frozen_root, largest_update, refuse_step

LR_EXCHANGED, LR_SUM, LR_OWED = "lr_travelled", "lr_since_exchange", "lr_owed"
"""Keys of the param groups for sums of learning rates: the divisor of the movement that was just exchanged, the sum
since the latest exchange, and the sum at the latest message, to which the error-feedback residuals belong. Checkpoints
hold them, so they keep their spelling."""


@dataclass(frozen=True)
class ZeroOneRule(UpdateRule):
    """The steps of 0/1 Adam. The meaning of the gradient argument depends on the step.

    - Steps that update the variance: the mean gradient. The step is AdamW's, bit for bit as long as there was no other
      kind of step before.
    - Other steps before the variance is frozen: the new momentum.
    - Local steps: this rank's own gradient, or, if ranks synchronize in this step, the mean of their movements.

    The weights are always ``anchor - moved / (sqrt(v) + eps)``. The anchor is the weights of all ranks at their latest
    synchronization; weight decay shrinks it. If movements are bounded, the quotient is clamped to what Adam could have
    moved in these steps, as are the movements that are sent later (``zero.onebit.bucket_momentum``).
    """

    phase: Phase
    takes_mean: bool  # whether the step gets the mean gradient
    comes_together: bool  # whether ranks synchronize in this step
    updates: int  # number of updates, this one included
    of_variance: int  # number of those that updated the variance
    is_bounded: bool  # whether movements are clamped

    # Not fused: the denominator would need a temporary copy of every tensor.
    starts: ClassVar = {"exp_avg": 0.0, "exp_avg_sq": 0.0, "moved": 0.0, "anchor": 0.0}

    @override
    def kernel(self, group: dict[str, Any], step: float | Tensor, device: torch.device) -> Kernel:
        if self.takes_mean:
            return self._mean_kernel(group, device)
        lr = float(group["lr"])
        shrink = 1 - lr * float(group["weight_decay"])
        beta1, total = float(group["betas"][0]), float(group.get(LR_EXCHANGED) or 1.0)
        first = 1 - beta1**self.updates if group["bias_correction"] else 1.0
        farthest = farthest_of(group, self.of_variance) if self.is_bounded else math.inf

        def update(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            for param, grad, exp_avg, exp_avg_sq, moved, anchor in zip(params, grads, *states, strict=True):
                denominator = scratch("one-bit", param.numel(), param.dtype, param.device)
                denominator_of(exp_avg_sq, group, self.of_variance, out=denominator)
                if self.phase is Phase.MOMENTUM:
                    exp_avg.copy_(grad)
                    param.mul_(shrink).addcdiv_(exp_avg, denominator, value=-lr / first)
                    anchor.copy_(param)
                    continue
                anchor.mul_(shrink)
                if self.comes_together:
                    torch.div(grad, total, out=exp_avg)
                    anchor.addcdiv_(grad, denominator, value=-1)
                    moved.zero_()
                    param.copy_(anchor)
                else:
                    exp_avg.lerp_(grad, 1 - beta1)
                    moved.add_(exp_avg, alpha=lr)
                    torch.sub(anchor, apart(moved, denominator, farthest), out=param)

        return update

    def _mean_kernel(self, group: dict[str, Any], device: torch.device) -> Kernel:
        adamw = AdamRule(decoupled=True).kernel(group, self.updates, device)
        lr = float(group["lr"])
        shrink = 1 - lr * float(group["weight_decay"])
        beta1, beta2 = group["betas"]
        first = 1 - beta1**self.updates if group["bias_correction"] else 1.0

        def update(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            exp_avgs, exp_avg_sqs, _, anchors = states
            if self.updates == self.of_variance:
                adamw(params, grads, [exp_avgs, exp_avg_sqs])
            else:  # the bias corrections differ, and elements without any gradient may have a momentum from codes
                for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
                    exp_avg.lerp_(grad, 1 - beta1)
                    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                    denominator = scratch("one-bit", param.numel(), param.dtype, param.device)
                    denominator_of(exp_avg_sq, group, self.of_variance, out=denominator)
                    param.mul_(shrink).addcdiv_(exp_avg, denominator, value=-lr / first)
            for param, anchor in zip(params, anchors, strict=True):
                anchor.copy_(param)

        return update


def denominator_of(variance: Tensor, group: dict[str, Any], updates: int, out: Tensor | None = None) -> Tensor:
    """Returns the divisor of movements, in the shape of ``variance`` (any); in ``out`` if given."""
    root = frozen_root(variance, out=out)
    if group["bias_correction"]:
        root.div_(_correction(group, updates))
    return root.add_(float(group["eps"]))


def farthest_of(group: dict[str, Any], updates: int) -> float:
    """Returns the largest distance from the anchor that Adam could reach since then; ``updates``: at least 1."""
    bound = largest_update(group["betas"], float(group.get(LR_SUM) or 0.0))
    # Denominators contain the bias correction of the variance; the bound does not.
    return bound * _correction(group, updates) if group["bias_correction"] else bound


def _correction(group: dict[str, Any], updates: int) -> float:
    return float((1 - float(group["betas"][1]) ** updates) ** 0.5)


def apart(moved: Tensor, denominator: Tensor, farthest: float) -> Tensor:
    """Writes a rank's distance from the anchor into ``denominator``: ``moved / denominator``, of the same shape."""
    torch.div(moved, denominator, out=denominator)
    return denominator.clamp_(-farthest, farthest) if farthest < math.inf else denominator


class ZeroOneAdam(ElementwiseOptimizer):
    """Adam whose ranks exchange less and less often, mostly with one bit per element.

    `0/1 Adam <https://arxiv.org/abs/2202.06009>`_. Until ``var_freeze_step`` the variance is updated at growing
    intervals. Such a step exchanges the uncompressed mean gradient, which updates momentum and variance as in Adam; the
    first step is AdamW's. In the other steps a compressed all-reduce averages the momenta. Afterwards ranks make local
    steps, and average their movements at growing intervals; in between their weights differ. Weight decay is decoupled
    and not part of what is sent. ZeRO stage 0 only. It needs an engine to step.

    The paper updates the variance at the end of a step. Here it is updated before it is used, as in Adam, because it
    would be 0 in the first step.

    State besides that of Adam: ``moved``, this rank's movement since the latest synchronization, times the root of the
    variance; and ``anchor``, the weights at that time.

    Args:
        params: Parameters or group dictionaries; ``exp_avg_mask`` as in :class:`~deepspeed.ops.onebit.OneBitAdam`.
        deepspeed: Ignored; accepted for compatibility with upstream.
        bias_correction: Correct the variance for its start at zero, and the momentum until the variance is frozen; the
            paper does not.
        eps_inside_sqrt: Must be False.
        max_grad_norm: Must be 0; ``gradient_clipping`` clips, by the norm of the mean gradient
            (``zero.onebit.momentum``).
        var_freeze_step: Last update that may update the variance.
        var_update_scaler: After this many updates of the variance the gap between them doubles.
        local_step_scaler: After this many local steps the gap between exchanges doubles.
        local_step_clipper: Largest gap between exchanges.
        amsgrad: Must be False.
        comm_backend_name: Ignored: the engine provides the process group.
        precondition: See :class:`~deepspeed.ops.onebit.OneBitAdam`; the bound of one step is multiplied by the sum of
            the learning rates since the latest synchronization, and applies to local steps too.

    Raises:
        ValueError: A number is out of range, or an argument that must be False or 0 is not.
    """

    _ds_driver = "deepspeed.zero.onebit.local_steps:LocalSteps"
    _ds_features = ("deepspeed.ops.onebit.feature",)
    _keeps_own_states = True
    _pickled_attributes = (
        *ElementwiseOptimizer._pickled_attributes,
        *("precondition", "var_freeze_step", "local_step_scaler", "local_step_clipper", "_variance"),
        *("phase", "takes_mean", "comes_together", "_updates", "variance_updates"),
    )

    def __init__(
        self,
        params: ParamsT,
        deepspeed: Any = None,
        lr: float = 1e-3,
        bias_correction: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        precondition: bool = True,
    ) -> None:
        check_family(self, eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, freeze_step=var_freeze_step)
        for name, value in (
            ("var_update_scaler", var_update_scaler),
            ("local_step_scaler", local_step_scaler),
            ("local_step_clipper", local_step_clipper),
        ):
            if value < 1:
                raise ValueError(f"ZeroOneAdam: {name}: expected 1 or more, found {value}; correct it")
        self.var_freeze_step = var_freeze_step
        self.precondition = precondition
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper
        self._variance = updates_of_variance(var_freeze_step, var_update_scaler)
        self._updates, self.variance_updates = 1, 1
        self.phase = Phase.WARM_UP
        self.takes_mean = False
        self.comes_together = True
        self.reminder = PhaseCheck(
            self,
            "0/1 Adam",
            var_freeze_step,
            "all %d updates were before the variance is frozen, so ranks exchanged at each of them: with 1 bit per "
            "element, or uncompressed if the variance was updated. Ranks make local steps after %d. Lower "
            "var_freeze_step, usually to the end of the learning rate's warm-up",
        )
        numbers = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, **numbers}, amsgrad=amsgrad)

    @property
    def rule(self) -> UpdateRule:
        """Returns the arithmetic of the update that :meth:`begin_update` has prepared."""
        return ZeroOneRule(
            self.phase,
            takes_mean=self.takes_mean,
            comes_together=self.comes_together,
            updates=self._updates,
            of_variance=self.variance_updates,
            is_bounded=self.precondition,
        )

    def begin_update(self, before: int) -> None:
        """Prepares the phase of the next update."""
        local = before - self.var_freeze_step
        self.phase = Phase.MOMENTUM if local < 0 else Phase.LOCAL
        self.takes_mean = before + 1 in self._variance
        self._updates = before + 1
        self.variance_updates = sum(number <= before + 1 for number in self._variance)
        gap = min(self.local_step_clipper, 2 ** min(local // self.local_step_scaler, 30)) if local >= 0 else 1
        self.comes_together = (local + 1) % gap == 0

    def coefficient(self, name: str) -> float:
        """Returns 1: the movement that is exchanged contains the learning rate already."""
        return 1.0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises, since the exchange with the other ranks is part of ``engine.step``."""
        refuse_step(self)


def updates_of_variance(last: int, scaler: int) -> frozenset[int]:
    """Returns the numbers of the updates, from 1 to ``last``, in which the variance is updated.

    The gap after the *j*-th of them, counted from 0, is ``2 ** (j // scaler)``, so there are about
    ``scaler * log2(last / scaler)`` of them.
    """
    found, number = [], 1
    while number <= last:
        found.append(number)
        number += 2 ** ((len(found) - 1) // scaler)
    return frozenset(found)
