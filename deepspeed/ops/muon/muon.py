"""Muon for matrices, Adam for the rest.

A matrix is orthogonalized by Newton-Schulz iterations. Five steps of a quintic polynomial push every singular value
towards 1 (`K. Jordan et al. <https://kellerjordan.github.io/posts/muon/>`_; the coefficients make small singular values
grow fastest at the price of ending anywhere in about 0.7 to 1.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from deepspeed.logging import log_dist_once
from deepspeed.ops.base import KeepsStateDtypes, check_hyperparameters, check_supported, evaluate, update_group
from deepspeed.ops.flat import AdamRule
from deepspeed.ops.fragments import FragmentTable
from deepspeed.ops.muon.flags import is_stack_of_matrices
from deepspeed.ops.muon.fragments import FragmentExchange
from deepspeed.uncompiled import torchs

_MATRIX_LR = 0.02
_ADAM_LR = 3e-4


class ScaledRows(NamedTuple):
    """Rows ``[start, stop)`` of a tensor, and what they are multiplied by."""

    start: int
    stop: int
    factor: float


class Muon(KeepsStateDtypes):
    """Momentum whose update is orthogonalized, for matrices; AdamW for every other parameter.

    See `K. Jordan et al. <https://kellerjordan.github.io/posts/muon/>`_. The update of an m x n matrix (for a
    convolution kernel, n is the product of all dimensions but the first) is scaled by ``sqrt(max(1, m / n))``. Weight
    decay is decoupled. The matrices of a stack, such as the weights of stacked experts, are updated separately.

    The key ``use_muon`` of a group selects the part it belongs to. A group without the key is divided: a parameter is
    a matrix if it has an attribute ``use_muon`` that is true (:func:`~deepspeed.ops.muon.set_optimizer_flags`), or
    no such attribute and at least two dimensions. The key ``stacked`` of a matrix group states whether its parameters
    are stacks of matrices. A matrix group without it is divided too: a parameter with three dimensions is a stack,
    unless its attribute ``muon_stacked`` is false; one with more is a stack if that attribute is true.

    Works on ordinary parameters, and after :meth:`attach_segments` on 1-D runs of fragments: each matrix is gathered to
    one rank, orthogonalized there, and its fragments are sent back. State is elementwise:
    ``momentum_buffer`` for matrices, Adam's for the rest.

    Args:
        lr: Step size of both parts; None means 0.02 for matrices and 3e-4 for the rest.
        weight_decay: Decoupled weight decay of both parts.
        ns_method: ``gram`` or ``standard``, see :func:`~deepspeed.ops.muon.muon.orthogonalize`.
        muon_lr: Step size of matrices; None means ``lr``.
        adam_lr: Step size of the rest; None means ``lr``.
        qk_clip_threshold: Attention logits above it are brought down to it after each step (MuonClip), see
            :mod:`~deepspeed.ops.muon.qk_clip`; inside an engine only. None: they are not measured.

    Raises:
        ValueError: A number or ``ns_method`` is out of range, or a parameter of a matrix group is no matrix.
    """

    _ds_features = ("deepspeed.ops.muon.feature",)
    _keeps_own_states = True
    _takes_tables_of_groups = True

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
        qk_clip_threshold: float | None = None,
    ) -> None:
        matrix_lr = next(value for value in (muon_lr, lr, _MATRIX_LR) if value is not None)
        rest_lr = next(value for value in (adam_lr, lr, _ADAM_LR) if value is not None)
        for rate in (matrix_lr, rest_lr):
            check_hyperparameters(self, lr=rate, betas=betas, eps=eps, weight_decay=weight_decay)
        if not 0 <= momentum < 1:
            raise ValueError(f"Muon: momentum: expected 0 <= momentum < 1, found {momentum}; correct it")
        if ns_method not in METHODS:
            raise ValueError(f"Muon: ns_method: expected {' or '.join(METHODS)}, found {ns_method!r}; correct it")
        if ns_steps < 1:
            raise ValueError(f"Muon: ns_steps: expected 1 or more, found {ns_steps}; correct it")
        if qk_clip_threshold is not None and not 0 < qk_clip_threshold < math.inf:
            raise ValueError(
                f"Muon: qk_clip_threshold: expected a finite number above 0, found {qk_clip_threshold}; correct it, or "
                "leave it out"
            )
        self.qk_clip_threshold = qk_clip_threshold
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
        self._exchanges: list[FragmentExchange] | None = None
        self._tables: tuple[FragmentTable, ...] = ()
        self._scaled_rows: Mapping[str, Sequence[ScaledRows]] | None = None
        super().__init__(params, {} if lr is None else {"lr": lr})

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickles and copies, without fragment tables, because these refer to runs by id."""
        own = {"_part_defaults": self._part_defaults, "qk_clip_threshold": self.qk_clip_threshold}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._exchanges, self._tables, self._scaled_rows = None, (), None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; without ``use_muon`` and ``stacked`` it becomes up to three, matrices first, then stacks."""
        if param_group.get("use_muon") is False or ("use_muon" in param_group and "stacked" in param_group):
            use_muon = bool(param_group["use_muon"])
            torchs(super().add_param_group)({**self._part_defaults[use_muon], **param_group})
            return
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        key, is_member = ("stacked", is_stack_of_matrices) if "use_muon" in param_group else ("use_muon", _is_flagged)
        order = (False, True) if key == "stacked" else (True, False)
        parts = [(value, [param for param in params if is_member(param) is value]) for value in order]
        if not params:
            parts = [(order[0], params)]
        for value, part in parts:
            if part or not params:
                self.add_param_group({**param_group, "params": part, key: value})

    def attach_segments(self, *tables: FragmentTable) -> None:
        """Sets which tensors the parameters (1-D runs) hold. Call again after the runs have changed.

        The name says segments, not fragments, because version 1.0.0 has it.

        Every rank of a table's group must call it with its own table; they need not do it at the same time.

        Args:
            *tables: The fragments, and how the tensors are cut over a group: a table for each group, in the same order
                on all ranks.

        Raises:
            ValueError: On every rank alike: a tensor of a matrix group is no matrix. On this rank: the runs do not hold
                what the table lists.
            KeyError: A parameter is not in a table.
        """
        settings = self._part_defaults[True]
        for group in self.param_groups:
            for name in ("ns_method", "ns_steps"):
                if group["use_muon"] and group[name] != settings[name]:
                    raise ValueError(
                        f"Muon: {name}: expected the same in all groups, as matrices are cut over ranks, found "
                        f"{group[name]!r} in one and {settings[name]!r} in the optimizer; give all groups the same"
                    )
        for param in (param for group in self.param_groups for param in group["params"]):
            _table_of(param, tables)
        groups = [index for index, group in enumerate(self.param_groups) if group["use_muon"]]
        stacks = [index for index in groups if self.param_groups[index].get("stacked", False)]
        matrices = [param for index in groups for param in self.param_groups[index]["params"]]
        self._tables = tables
        self._exchanges = []
        for table in tables:
            runs = [run for run in matrices if id(run) in table.by_param]
            found = FragmentExchange(table, runs, groups, stacks)
            self._exchanges.append(found)
            if found.num_matrices and found.is_exchanged:
                log_dist_once(
                    f"Muon: each of {found.num_matrices} matrices is orthogonalized by one of {len(table.ranks)} "
                    f"ranks; these exchange {found.all_sent_bytes:,} bytes in each update, of which this rank sends "
                    f"{found.sent_bytes:,}"
                )

    def scale_rows_after_step(self, rows: Mapping[str, Sequence[ScaledRows]]) -> None:
        """Sets rows, by tensor name in the tables, to scale after the next :meth:`step`; ignores other names."""
        self._scaled_rows = rows

    @property
    def sent_bytes(self) -> int:
        """Returns the bytes that this rank sends in a step; 0 if matrices are whole on every rank."""
        return sum(exchange.sent_bytes for exchange in self._exchanges or ())

    @property
    def heaviest_rank(self) -> int | None:
        """Returns the global rank that needs most memory for a step; None if all ranks need the same.

        With several fragment tables (experts have their own), the one with the largest matrix determines it.
        """
        exchanges = [exchange for exchange in self._exchanges or () if exchange.is_exchanged]
        owned = [exchange for exchange in exchanges if exchange.heaviest_rank is not None]
        if not owned:
            return None
        return max(owned, key=lambda exchange: exchange.heaviest_numels).heaviest_rank

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter with a gradient; returns what ``closure`` did. A collective if matrices are cut."""
        loss = evaluate(closure)
        matrix_groups = [group for group in self.param_groups if group["use_muon"]]
        if self._exchanges is None:
            self._step_whole(matrix_groups)
        else:
            self._step_fragments(self._exchanges, matrix_groups)
        for group in self.param_groups:
            if not group["use_muon"]:
                update_group(self, AdamRule(decoupled=True), group, fp32_states=True)
        if self.qk_clip_threshold is not None:
            self._scale_rows()
        return loss

    def _scale_rows(self) -> None:
        if self._scaled_rows is None or not self._tables:
            raise RuntimeError(
                "Muon(qk_clip_threshold=...): attention logits are not measured; pass the optimizer itself, not a "
                "callable that makes it, to deepspeed.initialize, and call engine.step()"
            )
        for run in (run for group in self.param_groups for run in group["params"] if self._scaled_rows):
            for fragment in _table_of(run, self._tables).of(run):
                columns = math.prod(fragment.shape[1:])
                for rows in self._scaled_rows.get(fragment.name, ()):
                    first = max(rows.start * columns, fragment.tensor_start)
                    last = min(rows.stop * columns, fragment.tensor_stop)
                    if first < last:
                        offset = fragment.start - fragment.tensor_start
                        run[first + offset : last + offset].mul_(rows.factor)
        self._scaled_rows = {}

    def _step_whole(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            for param in group["params"]:
                if param.grad is None or param.numel() == 0:
                    continue
                if param.dim() < 2:
                    raise ValueError(
                        f"Muon orthogonalizes matrices, but a parameter has shape {tuple(param.shape)}; put it in a "
                        "group with use_muon=False, or call attach_segments if it is a run of fragments"
                    )
                update = self._advance(group, param)(slice(None))
                is_stack = group.get("stacked", False)
                direction = orthogonalize(
                    update, method=group["ns_method"], num_steps=group["ns_steps"], is_stack=is_stack
                )
                _apply(group, param, direction, param.shape[-2:] if is_stack else param.shape)

    def _step_fragments(self, exchanges: list[FragmentExchange], groups: list[dict[str, Any]]) -> None:
        runs = {id(param): group for group in groups for param in group["params"]}
        updates = {
            id(param): self._advance(group, param)
            for group in groups
            for param in group["params"]
            if param.grad is not None
        }
        # An owner may hold no fragment of its matrix, so all groups share the settings of the orthogonalization.
        settings = self._part_defaults[True]

        def update_of(run: Tensor, elements: slice) -> Tensor:
            if id(run) in updates:
                return updates[id(run)](elements)
            return run.new_zeros(elements.stop - elements.start)  # the other ranks wait for this part

        def apply(run: Tensor, elements: slice, direction: Tensor, shape: tuple[int, ...]) -> None:
            if id(run) in updates:
                _apply(runs[id(run)], run[elements], direction, shape)

        orthogonalize_part = partial(orthogonalize, method=settings["ns_method"], num_steps=settings["ns_steps"])
        for exchange in exchanges:
            exchange.step(update_of, orthogonalize_part, apply)

    def _advance(self, group: dict[str, Any], param: Tensor) -> Callable[[slice], Tensor]:
        """Updates the momentum; returns a function from a slice of the first dimension to its fp32 update."""
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


def _table_of(run: Tensor, tables: tuple[FragmentTable, ...]) -> FragmentTable:
    found = next((table for table in tables if id(run) in table.by_param), None)
    if found is None:
        raise KeyError(
            f"Muon: no fragment table has an entry for a run of {run.numel()} elements; call attach_segments again "
            "after the runs have changed"
        )
    return found


def _is_flagged(param: Tensor) -> bool:
    shape = getattr(param, "ds_shape", param.shape)
    return bool(getattr(param, "use_muon", len(shape) >= 2)) and len(shape) >= 2


def _apply(group: dict[str, Any], weight: Tensor, direction: Tensor, shape: tuple[int, ...]) -> None:
    """Applies decoupled weight decay, then the step, to ``weight``, a part of a matrix of this ``shape``, in place."""
    lr = float(group["lr"])
    if group["weight_decay"]:
        weight.mul_(1 - lr * group["weight_decay"])
    scale = math.sqrt(max(1.0, shape[0] / math.prod(shape[1:])))
    weight.add_(direction.to(weight.device), alpha=-lr * scale)


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7

METHODS = ("gram", "standard")


def orthogonalize(matrix: Tensor, *, method: str = "gram", num_steps: int = 5, is_stack: bool = False) -> Tensor:
    """Returns the nearest orthogonal matrix, roughly.

    Args:
        matrix: 2-D, any floating dtype; more dimensions are folded into columns, as for convolutions.
        method: ``standard`` iterates on the matrix, in bf16 on accelerators and in fp32 on the CPU. ``gram`` iterates
            on its product with its own transpose, in fp32: the same polynomial with most multiplications on the short
            side, so the longer the matrix the cheaper it is in comparison.
        is_stack: Whether ``matrix`` is a stack of matrices, 3-D or more. Each matrix of the last two dimensions is
            orthogonalized separately, all in one batch.

    Returns:
        A tensor of the shape of ``matrix``, fp32.

    Raises:
        ValueError: ``matrix`` has fewer than 2 dimensions (3 for a stack), or the method is unknown.
    """
    if matrix.dim() < (3 if is_stack else 2):
        what = "a stack of matrices (3 dimensions or more)" if is_stack else "a matrix (2 dimensions or more)"
        raise ValueError(f"orthogonalize: expected {what}, found shape {tuple(matrix.shape)}; reshape it")
    if method not in METHODS:
        raise ValueError(f"orthogonalize: method: expected {' or '.join(METHODS)}, found {method!r}; correct it")
    wide = matrix.reshape((-1, *matrix.shape[-2:]) if is_stack else (matrix.shape[0], -1)).float()
    is_tall = wide.shape[-2] > wide.shape[-1]
    if is_tall:
        wide = wide.mT
    norm = wide.norm(dim=(-2, -1), keepdim=True) if is_stack else wide.norm()
    wide = wide / norm.clamp(min=_EPS)
    wide = _gram(wide, num_steps) if method == "gram" else _standard(wide, num_steps)
    return (wide.mT if is_tall else wide).reshape(matrix.shape).float()


def _standard(wide: Tensor, num_steps: int) -> Tensor:
    a, b, c = _COEFFICIENTS
    if wide.device.type != "cpu":
        wide = wide.bfloat16()
    for _ in range(num_steps):
        gram = wide @ wide.mT
        wide = _add_product(wide, _add_product(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide


def _gram(wide: Tensor, num_steps: int) -> Tensor:
    """Runs the steps on the Gram matrix: X' = P X with P = aI + bA + cA^2 and A = X X^T; all P commute with A."""
    a, b, c = _COEFFICIENTS
    gram = wide @ wide.mT
    gathered: Tensor | None = None
    for step in range(num_steps):
        polynomial = _add_product(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        gathered = polynomial if gathered is None else polynomial @ gathered
        if step + 1 < num_steps:
            gram = polynomial @ gram @ polynomial
            # Rounding makes it slightly asymmetric, which the next steps would amplify.
            gram = (gram + gram.mT).mul_(0.5)
    return wide if gathered is None else gathered @ wide


def _add_product(addend: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    product = torch.addmm if left.dim() == 2 else torch.baddbmm
    return product(addend, left, right, beta=beta, alpha=alpha)
