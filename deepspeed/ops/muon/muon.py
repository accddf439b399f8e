"""Muon for matrices, Adam for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from deepspeed.ops.base import KeepsStateDtypes, check_supported, evaluate, update_group
from deepspeed.ops.checks import check_hyperparameters
from deepspeed.ops.muon.flags import is_stack_of_matrices
from deepspeed.ops.muon.fragments import FragmentExchange
from deepspeed.ops.muon.newton_schulz import METHODS, orthogonalize
from deepspeed.ops.rules import AdamRule
from deepspeed.ops.segments import SegmentTable
from deepspeed.uncompiled import torchs

_MATRIX_LR = 0.02
_ADAM_LR = 3e-4


class Muon(KeepsStateDtypes):
    """Momentum whose update is orthogonalised, for matrices; AdamW for every other parameter.

    See `K. Jordan et al. <https://kellerjordan.github.io/posts/muon/>`_. The update of an m x n matrix (of a kernel of
    a convolution, further dimensions count as columns) is scaled by ``sqrt(max(1, m / n))``; weight decay is decoupled.
    A stack of matrices, such as the weights of stacked experts, is so many matrices.

    Which part a group belongs to is said by its key ``use_muon``. A group without the key is divided: a parameter is
    a matrix if it has an attribute ``use_muon`` that is true (:func:`~deepspeed.ops.muon.set_optimizer_flags`), or
    no such attribute and at least two dimensions. Likewise its key ``stacked`` says whether the parameters of a matrix
    group are stacks of matrices. A matrix group without it is divided: a parameter with three dimensions is a stack,
    unless its attribute ``muon_stacked`` says otherwise.

    Works on ordinary parameters, and after :meth:`attach_segments` on 1-D runs holding pieces of tensors: each matrix
    is gathered to one rank, orthogonalised there, and its pieces are sent back. State is elementwise:
    ``momentum_buffer`` for matrices, Adam's for the rest.

    Args:
        params: Parameters or group dictionaries.
        lr: Step size of both parts; None means 0.02 for matrices and 3e-4 for the rest.
        momentum: Decay of the momentum (matrices).
        weight_decay: Decoupled weight decay of both parts.
        ns_method: ``gram`` or ``standard``, see :func:`~deepspeed.ops.muon.newton_schulz.orthogonalize`.
        betas: Decay of the moments (rest).
        eps: Added to the root of the second moment (rest).
        muon_lr: Step size of matrices, before ``lr``.
        adam_lr: Step size of the rest, before ``lr``.
        ns_steps: Iterations of the orthogonalisation.
        nesterov: Look ahead along the momentum.

    Raises:
        ValueError: A number or ``ns_method`` is out of range, or a parameter of a matrix group is no matrix.
    """

    _ds_features = ("deepspeed.ops.muon.feature",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_method: str = "gram",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        ns_steps: int = 5,
        nesterov: bool = True,
    ) -> None:
        matrix_lr = next(value for value in (muon_lr, lr, _MATRIX_LR) if value is not None)
        rest_lr = next(value for value in (adam_lr, lr, _ADAM_LR) if value is not None)
        for rate in (matrix_lr, rest_lr):
            check_hyperparameters(self, lr=rate, betas=betas, eps=eps, weight_decay=weight_decay)
        if not 0 <= momentum < 1:
            raise ValueError(f"Muon: momentum must lie in [0, 1), but is {momentum}")
        if ns_method not in METHODS:
            raise ValueError(f"Muon: ns_method must be one of {', '.join(METHODS)}, but is {ns_method!r}")
        if ns_steps < 1:
            raise ValueError(f"Muon: ns_steps must be at least 1, but is {ns_steps}")
        self._part_defaults: dict[bool, dict[str, Any]] = {
            True: {
                "lr": matrix_lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "ns_method": ns_method,
                "ns_steps": ns_steps,
                "nesterov": nesterov,
            },
            False: {"lr": rest_lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay},
        }
        self._exchange: FragmentExchange | None = None
        super().__init__(params, {})

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickles and copies keep: also the defaults, but no segment table (it names runs by id)."""
        return {**super().__getstate__(), "_part_defaults": self._part_defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._exchange = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; without ``use_muon`` and ``stacked`` it becomes up to three, matrices first, then stacks."""
        if param_group.get("use_muon") is False or ("use_muon" in param_group and "stacked" in param_group):
            use_muon = bool(param_group["use_muon"])
            torchs(super().add_param_group)({**self._part_defaults[use_muon], **param_group})
            return
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        key, says = ("stacked", is_stack_of_matrices) if "use_muon" in param_group else ("use_muon", _is_flagged)
        order = (False, True) if key == "stacked" else (True, False)
        parts = [(value, [param for param in params if says(param) is value]) for value in order]
        if not params:
            parts = [(order[0], params)]
        for value, part in parts:
            if part or not params:
                self.add_param_group({**param_group, "params": part, key: value})

    def attach_segments(self, table: SegmentTable) -> None:
        """Says which tensors the parameters (1-D runs) hold. Call again after the runs have changed.

        Every rank of ``table.group`` must call it with its own table; they need not do it at the same time.

        Args:
            table: The pieces, and how the tensors are cut over the group.

        Raises:
            ValueError: On every rank alike: a tensor of a matrix group is no matrix. On this rank: the runs do not hold
                what the table says they do.
            KeyError: A parameter is not in the table.
        """
        settings = self._part_defaults[True]
        for group in self.param_groups:
            for name in ("ns_method", "ns_steps"):
                if group["use_muon"] and group[name] != settings[name]:
                    raise ValueError(
                        f"Muon: {name} must be the same in all groups when matrices are cut over ranks, but one has "
                        f"{group[name]!r} and the optimizer {settings[name]!r}"
                    )
        groups = [index for index, group in enumerate(self.param_groups) if group["use_muon"]]
        stacks = [index for index in groups if self.param_groups[index].get("stacked", False)]
        runs = [param for index in groups for param in self.param_groups[index]["params"]]
        self._exchange = FragmentExchange(table, runs, groups, stacks)

    @property
    def heaviest_rank(self) -> int | None:
        """The rank in the group of the segment table that needs most memory for a step; None if all are alike."""
        return None if self._exchange is None else self._exchange.heaviest_rank

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. A collective when matrices are cut over a group.

        Args:
            closure: Recomputes the loss; called with gradients enabled.

        Returns:
            What ``closure`` returned, or None.
        """
        loss = evaluate(closure)
        matrix_groups = [group for group in self.param_groups if group["use_muon"]]
        if self._exchange is None:
            self._step_whole(matrix_groups)
        else:
            self._step_fragments(self._exchange, matrix_groups)
        for group in self.param_groups:
            if not group["use_muon"]:
                update_group(self, AdamRule(decoupled=True), group, fp32_states=True)
        return loss

    def _step_whole(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.dim() < 2:
                    raise ValueError(
                        f"Muon orthogonalises matrices, but a parameter has shape {tuple(param.shape)}; put it in a "
                        "group with use_muon=False, or call attach_segments if it is a run of fragments"
                    )
                update = self._advance(group, param)(slice(None))
                is_stack = group.get("stacked", False)
                direction = orthogonalize(
                    update, method=group["ns_method"], num_steps=group["ns_steps"], is_stack=is_stack
                )
                _apply(group, param, direction, param.shape[-2:] if is_stack else param.shape)

    def _step_fragments(self, exchange: FragmentExchange, groups: list[dict[str, Any]]) -> None:
        runs = {id(param): group for group in groups for param in group["params"]}
        updates = {
            id(param): self._advance(group, param)
            for group in groups
            for param in group["params"]
            if param.grad is not None
        }
        # An owner need not hold a piece of its matrix, so how to orthogonalise cannot differ between groups.
        settings = self._part_defaults[True]

        def update_of(run: Tensor, elements: slice) -> Tensor:
            if id(run) in updates:
                return updates[id(run)](elements)
            return run.new_zeros(elements.stop - elements.start)  # takes part, because the other ranks wait for it

        def apply(run: Tensor, elements: slice, direction: Tensor, shape: tuple[int, ...]) -> None:
            if id(run) in updates:
                _apply(runs[id(run)], run[elements], direction, shape)

        exchange.step(
            update_of,
            partial(orthogonalize, method=settings["ns_method"], num_steps=settings["ns_steps"]),
            apply,
        )

    def _advance(self, group: dict[str, Any], param: Tensor) -> Callable[[slice], Tensor]:
        """Updates the momentum; returns what gives the fp32 update of a slice of elements (rows of a tensor)."""
        check_supported(self, param)
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param, dtype=torch.promote_types(param.dtype, torch.float32))
        momentum = state["momentum_buffer"]
        assert param.grad is not None
        grad = param.grad.to(momentum.dtype)
        if group.get("maximize", False):
            grad = -grad
        momentum.lerp_(grad, 1 - group["momentum"])
        if not group["nesterov"]:
            return lambda elements: momentum[elements]
        return lambda elements: torch.lerp(grad[elements], momentum[elements], group["momentum"])


def _is_flagged(param: Tensor) -> bool:
    shape = getattr(param, "ds_shape", param.shape)
    return bool(getattr(param, "use_muon", len(shape) >= 2)) and len(shape) >= 2


def _apply(group: dict[str, Any], weight: Tensor, direction: Tensor, shape: tuple[int, ...]) -> None:
    """Decoupled decay, then the step. The scale compares rows with columns of the whole matrix."""
    lr = float(group["lr"])
    if group["weight_decay"]:
        weight.mul_(1 - lr * group["weight_decay"])
    scale = math.sqrt(max(1.0, shape[0] / math.prod(shape[1:])))
    weight.add_(direction.to(weight.device), alpha=-lr * scale)
