"""1-bit LAMB."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from deepspeed.ops.exchange import add_over_ranks, exchange_device, largest_over_ranks
from deepspeed.ops.fragments import FragmentTable, TensorFragment
from deepspeed.ops.lamb.fused_lamb import BLOCK_NUMEL, BlockMap, FusedLamb, block_most, block_squares, multiply_blocks
from deepspeed.ops.onebit.adam import check_family
from deepspeed.ops.onebit.phases import Phase, PhaseCheck, frozen_root, refuse_step

_MEMORY = "onebit_lamb"
"""Key of the param groups. By tensor: its scaling coefficient, its average trust ratio, and its last factor."""


@dataclass
class _LambTensorState:
    scaling: float = 0.0
    average: float = 0.0
    last_factor: float = 1.0


class OneBitLamb(FusedLamb):
    """LAMB that exchanges its momentum with one bit per element once its variance is stable.

    `1-bit LAMB <https://arxiv.org/abs/2104.06069>`_. The first ``freeze_step`` updates are LAMB's without bias
    correction, and average the trust ratio of each tensor. Afterwards variance and averages are frozen. Momenta are
    scaled to equal size and averaged by a compressed all-reduce. The trust ratio of a tensor is its average times a
    factor: the ratio of the roots of the frozen variance and of a second variance. That one is updated with the
    gradients that follow from the momenta. It needs an engine to step.

    State besides that of LAMB: ``exp_avg_sq_fresh``, the second variance.

    Args:
        params: Parameters or group dictionaries; ``exp_avg_mask`` as in :class:`~deepspeed.ops.onebit.OneBitAdam`.
        deepspeed: Ignored; accepted for compatibility with upstream.
        freeze_step: Updates of the warm-up.
        bias_correction: Ignored, as upstream: there is no bias correction.
        eps_inside_sqrt: Must be False.
        weight_decay: Decoupled weight decay, part of the direction whose norm counts.
        max_grad_norm: Must be 0; ``gradient_clipping`` clips, by the norm of the mean gradient.
        max_coeff: Greatest trust ratio of the warm-up.
        min_coeff: Least trust ratio of the warm-up.
        amsgrad: Must be False.
        cuda_aware: Ignored.
        comm_backend_name: Ignored: the engine provides the process group.
        coeff_beta: Decay of the average of trust ratios.
        factor_threshold: Largest relative change of a factor in one update.

    Raises:
        ValueError: A number is out of range, or an argument that must be False or 0 is not.
    """

    _ds_driver = "deepspeed.zero.onebit.momentum:MomentumExchange"
    _ds_features = ("deepspeed.ops.onebit.feature",)
    _keeps_own_states = True
    precondition = False
    """False: the coefficients scale whole tensors, as in the paper."""

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
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        check_family(self, eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, freeze_step=freeze_step)
        if not 0 <= coeff_beta < 1 or not 0 < factor_min <= factor_max or factor_threshold < 0:
            raise ValueError(
                "OneBitLamb: expected 0 <= coeff_beta < 1, 0 < factor_min <= factor_max and factor_threshold >= 0, "
                f"found {coeff_beta}, {factor_min}, {factor_max} and {factor_threshold}; correct them"
            )
        super().__init__(
            params,
            lr=lr,
            bias_correction=False,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
            amsgrad=amsgrad,
        )
        self.freeze_step = freeze_step
        self.coeff_beta = coeff_beta
        self.factor_bounds = (factor_min, factor_max)
        self.factor_threshold = factor_threshold
        self.phase = Phase.WARM_UP
        self.reminder = PhaseCheck(self, "1-bit LAMB", freeze_step)

    def begin_update(self, before: int) -> None:
        """Sets the phase of the next update. Every rank must call it: the end of the warm-up is a collective."""
        former, self.phase = self.phase, Phase.WARM_UP if before < self.freeze_step else Phase.MOMENTUM
        if self.phase is Phase.WARM_UP:
            if former is Phase.MOMENTUM:  # an earlier checkpoint was loaded
                for state in self.state.values():
                    state.pop("exp_avg_sq_fresh", None)
        elif not any(one.scaling for one in self._remembered().values()):
            self._find_scaling()

    def coefficient(self, name: str) -> float:
        """Returns the factor on the momentum of a tensor before it is sent; it is divided by it afterwards."""
        return self._remembered().get(name, _LambTensorState()).scaling or 1.0

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickles and copies, with the attributes that determine a step."""
        names = ("freeze_step", "coeff_beta", "factor_bounds", "factor_threshold", "phase")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    # -- state of tensors ----------------------------------------------------------------------------------------------

    def _remembered(self) -> dict[str, _LambTensorState]:
        """Returns the state of each updated tensor by name, equal on all ranks. It is saved with the param groups."""
        found: dict[str, _LambTensorState] = {}
        for group in self.param_groups:
            found.update({name: _LambTensorState(*numbers) for name, numbers in group.get(_MEMORY, {}).items()})
        return found

    def _remember(self, tensors: dict[str, _LambTensorState]) -> None:
        numbers = {name: (one.scaling, one.average, one.last_factor) for name, one in tensors.items()}
        for group in self.param_groups:
            group[_MEMORY] = dict(numbers)

    def _names(self) -> dict[int, str]:
        return {shared.index: shared.name for shared in self._attached().shared}

    def _find_scaling(self) -> None:
        """Sets the scaling coefficient of each tensor to 1 / (root mean square of its momentum). A collective.

        The paper multiplies it by the mean of the root mean squares over all tensors. That factor is common to
        everything that is sent, so it cancels out; without it, pipeline stages need no exchange.
        """
        table = self._attached()
        members = [param for group in self.param_groups for param in group["params"]]
        device = exchange_device(members, table.axis)
        sums = torch.zeros(2, table.num_tensors, dtype=torch.float64, device=device)
        for param in members:
            state = self.state.get(param)
            if state:
                block_map = self._maps[id(param)]
                squares = torch.zeros(2, block_map.num_blocks, dtype=torch.float64, device=param.device)
                block_squares(state["exp_avg"].view(-1), squares[0])
                sums[0] += block_map.sums(squares)[0].to(device)
                for fragment in table.of(param):
                    sums[1, fragment.index] += fragment.numel
        add_over_ranks(sums, table.axis, "1-bit LAMB's sizes of momenta")
        roots = (sums[0] / sums[1].clamp(min=1)).sqrt()
        remembered = self._remembered()
        for index, name in self._names().items():
            one = remembered.setdefault(name, _LambTensorState())
            root = roots[index].item()
            one.scaling = 1.0 / root if root > 0 else 1.0
        self._remember(remembered)

    def _attached(self) -> FragmentTable:
        if self._table is None:
            refuse_step(self)
        assert self._table is not None
        return self._table

    # -- steps ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters; returns the loss of ``closure`` (warm-up only). A collective if tensors are cut.

        After the warm-up the gradient of a parameter holds the new momentum.
        """
        table = self._attached()
        if self.phase is Phase.MOMENTUM:
            self._step_frozen(table)
            return None
        loss = super().step(closure)
        # Averages the trust ratios of the latest update; a ratio of 1 means no ratio.
        assert self._coeffs is not None
        remembered = self._remembered()
        ratios = self._coeffs.tolist()
        for index, name in self._names().items():
            one = remembered.setdefault(name, _LambTensorState())
            if ratios[index] != 1.0:
                one.average = self.coeff_beta * one.average + (1 - self.coeff_beta) * ratios[index]
        self._remember(remembered)
        return loss

    def _step_frozen(self, table: FragmentTable) -> None:
        updates = [
            _FrozenUpdate(group, param, param.grad, self.state[param], self._maps[id(param)], table.of(param))
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        device = exchange_device((param for g in self.param_groups for param in g["params"]), table.axis)
        squares = torch.zeros(2, table.num_tensors, dtype=torch.float64, device=device)
        most = torch.zeros(table.num_tensors, dtype=torch.float64, device=device)
        for update in updates:
            sums, largest = update.advance()
            squares += sums.to(device)
            most = torch.maximum(most, largest.to(device))
        add_over_ranks(squares, table.axis, "1-bit LAMB's norms of updates")
        largest_over_ranks(most, table.axis, "1-bit LAMB's largest ratios of variances")
        ratios = self._ratios(squares, most)
        self._coeffs = ratios.float()
        for update in updates:
            update.apply(ratios)

    def _ratios(self, squares: Tensor, most: Tensor) -> Tensor:
        """Returns the trust ratio of every tensor: the average of its warm-up times this update's factor."""
        remembered = self._remembered()
        ratios = torch.ones_like(most)
        factors, (adam_norms, norms) = most.tolist(), squares.sqrt().tolist()  # without and with weight decay
        low, high = self.factor_bounds
        for index, name in self._names().items():
            if factors[index] == 0:
                continue  # no rank has a gradient of this tensor
            one = remembered.setdefault(name, _LambTensorState())
            factor = factors[index]
            if norms[index] > 0:
                share = min(1.0, adam_norms[index] / norms[index])
                factor = factor * share + 1.0 - share
            factor = min(max(factor, low), high)
            bounds = (1 - self.factor_threshold) * one.last_factor, (1 + self.factor_threshold) * one.last_factor
            one.last_factor = min(max(factor, bounds[0]), bounds[1])
            # A tensor whose ratio was always 1 in the warm-up has no average.
            ratios[index] = (one.average or 1.0) * one.last_factor
        self._remember(remembered)
        return ratios


@dataclass(frozen=True)
class _FrozenUpdate:
    group: dict[str, Any]
    param: Tensor
    momentum: Tensor
    state: dict[str, Any]
    block_map: BlockMap
    fragments: tuple[TensorFragment, ...]

    def advance(self) -> tuple[Tensor, Tensor]:
        """Stores the new momentum and updates the second variance.

        Returns:
            2 x num_tensors fp64: the squared norms of the direction without and with weight decay; and per tensor the
            largest ratio of the roots of the variances, 0 where this parameter holds none of it.
        """
        state, (beta1, beta2), eps = self.state, self.group["betas"], self.group["eps"]
        if "exp_avg" not in state:  # its first gradient came after the warm-up
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            work = torch.promote_types(self.param.dtype, torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(self.param, dtype=work, memory_format=torch.contiguous_format)
        if "exp_avg_sq_fresh" not in state:
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
        state["step"] += 1
        exp_avg, fresh = state["exp_avg"].view(-1), state["exp_avg_sq_fresh"].view(-1)
        momentum = self.momentum.reshape(-1).to(exp_avg.dtype)
        gradient = momentum.sub(exp_avg, alpha=beta1).div_(1 - beta1)
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        exp_avg.copy_(momentum)
        frozen = self._denominator()
        excess = frozen.div(fresh.sqrt().add_(eps)).masked_fill_(frozen.isinf(), 0.0)
        for fragment in self.fragments:  # the rest of a tensor's last block is padding
            excess[fragment.stop : -(-fragment.stop // BLOCK_NUMEL) * BLOCK_NUMEL] = 0.0
        largest = self.block_map.most(block_most(excess))
        squares = torch.zeros(2, self.block_map.num_blocks, dtype=torch.float64, device=self.param.device)
        direction = exp_avg / frozen
        block_squares(direction, squares[0])
        block_squares(direction.add_(self._weights(), alpha=self.group["weight_decay"]), squares[1])
        return self.block_map.sums(squares), largest

    def apply(self, ratios: Tensor) -> None:
        """Subtracts the direction, times the learning rate and the ratio of each tensor, from the weights."""
        factors = self.block_map.spread(ratios.to(self.param.device, torch.float32))
        lr = self.group["lr"]
        direction = self.state["exp_avg"].view(-1) / self._denominator()
        direction.add_(self._weights(), alpha=self.group["weight_decay"])
        multiply_blocks(direction, factors)
        self.param.copy_(self._weights().sub(direction, alpha=float(lr)).view_as(self.param))

    def _denominator(self) -> Tensor:
        return frozen_root(self.state["exp_avg_sq"].view(-1)).add_(self.group["eps"])

    def _weights(self) -> Tensor:
        return self.param.reshape(-1).to(self.state["exp_avg"].dtype)
