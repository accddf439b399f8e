"""LAMB on whole tensors and on fragments of them.

Sums per tensor over a flat run are computed in blocks of 64 elements. Tensors start at multiples of 64 elements and are
cut only there, so a block belongs to one tensor and has the same elements under any sharding. Norms are computed per
block in fp32 and their squares added per tensor in fp64, so the cuts change only the last bits of the fp64 sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from deepspeed.errors import NotYetSupportedError
from deepspeed.ops.base import KeepsStateDtypes, check_hyperparameters, check_supported, evaluate
from deepspeed.ops.exchange import add_over_ranks, exchange_device
from deepspeed.ops.flat import default_chunk_numel, scratch
from deepspeed.ops.fragments import FragmentTable, TensorFragment
from deepspeed.uncompiled import torchs


class FusedLamb(KeepsStateDtypes):
    """Adam whose step is rescaled per tensor by the ratio of weight norm to update norm.

    `Large Batch Optimization for Deep Learning <https://arxiv.org/abs/1904.00962>`_, algorithm 2, with the ratio kept
    within ``[min_coeff, max_coeff]``. Works on ordinary parameters, and after :meth:`attach_segments` on 1-D runs
    that hold fragments of tensors: norms are then added over the ranks by one all-reduce per step of two numbers per
    tensor. State (``exp_avg``, ``exp_avg_sq``, fp32, and ``step``) is elementwise, as Adam's.

    The update direction is computed twice, for its norm and for the step, rather than stored: no buffer of the size
    of the parameters.

    Args:
        lr: Step size; a tensor is allowed.
        bias_correction: Correct the moments for their start at zero.
        eps_inside_sqrt: Add ``eps`` before taking the root.
        weight_decay: Decoupled weight decay, part of the direction whose norm counts.
        max_grad_norm: Not available; clip with ``gradient_clipping`` or ``torch.nn.utils.clip_grad_norm_``.
        max_coeff: Greatest ratio.
        min_coeff: Least ratio.
        amsgrad: Not available.

    Raises:
        ValueError: ``amsgrad`` is requested, or a number is out of range.
        NotYetSupportedError: ``max_grad_norm`` is not 0.
    """

    _adds_norms_of_parts = True  # not of classes derived from it

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        check_hyperparameters(self, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        if max_grad_norm:
            raise NotYetSupportedError(
                f"FusedLamb does not clip (max_grad_norm={max_grad_norm}); set gradient_clipping in the config, or "
                "call torch.nn.utils.clip_grad_norm_ before the step"
            )
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(
                f"FusedLamb: expected 0 <= min_coeff <= max_coeff, found {min_coeff} and {max_coeff}; correct them"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        self._table: FragmentTable | None = None
        self._maps: dict[int, BlockMap] = {}
        self._coeffs: Tensor | None = None
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy, without a fragment table, because the table refers to runs by id."""
        super().__setstate__(state)
        self._table, self._maps, self._coeffs = None, {}, None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; other optimizers' keys have no effect. Raises ValueError: it requests AMSGrad."""
        if isinstance(param_group, dict) and param_group.get("amsgrad"):
            raise ValueError("FusedLamb has no AMSGrad variant; remove amsgrad=True")
        torchs(super().add_param_group)(param_group)

    def attach_segments(self, table: FragmentTable) -> None:
        """Sets which tensors the parameters (1-D runs) hold. Call again after the runs have changed.

        The name says segments, not fragments, because version 1.0.0 has it.

        Args:
            table: Fragments start at multiples of 64 elements; padding must hold zeros. With a group, every rank of it
                must attach, and from then on call :meth:`step` together.

        Raises:
            ValueError: A fragment is not aligned.
            KeyError: A parameter is not in the table.
        """
        self._maps = {
            id(param): BlockMap(table.of(param), param.numel(), table.num_tensors, param.device)
            for group in self.param_groups
            for param in group["params"]
        }
        self._table = table

    def get_lamb_coeffs(self) -> list[float]:
        """Returns the ratios of the latest step: one per tensor, in the order of the table or of the parameters."""
        return [] if self._coeffs is None else self._coeffs.tolist()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter with a gradient; returns what ``closure`` did. A collective if tensors are cut."""
        loss = evaluate(closure)
        num_tensors = self._table.num_tensors if self._table else sum(len(g["params"]) for g in self.param_groups)
        updates = list(self._updates(num_tensors))
        axis = self._table.axis if self._table is not None else None
        device = exchange_device((param for g in self.param_groups for param in g["params"]), axis)
        squares = torch.zeros(2, num_tensors, dtype=torch.float64, device=device)
        for update in updates:
            squares += update.advance_moments().to(device)
        if self._table is not None:
            add_over_ranks(squares, axis, "LAMB's norms of weights and updates")
            _add_over_parts(squares, self._table)
        ratios = _ratios(squares)
        self._coeffs = ratios.clamp(self.defaults["min_coeff"], self.defaults["max_coeff"])
        for update in updates:
            bounded = ratios.clamp(update.group["min_coeff"], update.group["max_coeff"])
            if update.has_own_bounds(self.defaults):
                self._coeffs = torch.where(update.holds().to(device), bounded, self._coeffs)
            update.apply(bounded)
        return loss

    def _updates(self, num_tensors: int) -> Iterator[_Update]:
        members = [(group, param) for group in self.param_groups for param in group["params"]]
        for index, (group, param) in enumerate(members):
            if param.grad is None:
                continue
            check_supported(self, param)
            if self._table is None:
                fragment = TensorFragment(f"parameter {index}", index, 0, param.numel(), 0, tuple(param.shape))
                block_map = BlockMap((fragment,), param.numel(), num_tensors, param.device)
            else:
                if id(param) not in self._maps:
                    raise RuntimeError(
                        "FusedLamb: expected the runs of attach_segments, found another one; call attach_segments again"
                    )
                block_map = self._maps[id(param)]
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                work = torch.promote_types(param.dtype, torch.float32)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(param, dtype=work, memory_format=torch.contiguous_format)
            state["step"] += 1
            yield _Update(group, param, param.grad, state, block_map)


def _add_over_parts(squares: Tensor, table: FragmentTable) -> None:
    """Adds ``squares`` ``[2, num_tensors]`` of tensor-parallel parts over their ranks; a collective if any are."""
    if table.cut is None:
        return
    columns = torch.tensor(table.cut.columns, device=squares.device)
    counts = torch.tensor(table.cut.counts, dtype=squares.dtype, device=squares.device)
    summed = squares[:, columns] * counts
    add_over_ranks(summed, table.cut.axis, "LAMB's norms of tensors that are cut over ranks")
    squares[:, columns] = summed


def _ratios(squares: Tensor) -> Tensor:
    """Returns the weight norm over the update norm per tensor, rounded to fp32; 1 where either is zero."""
    weight_norm, update_norm = squares.sqrt().float()
    usable = (weight_norm > 0) & (update_norm > 0)
    return torch.where(usable, weight_norm / update_norm.where(usable, torch.ones_like(update_norm)), 1.0)


@dataclass(frozen=True)
class _Update:
    """One step of one parameter, in two halves: before and after the reduction of norms."""

    group: dict[str, Any]
    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    block_map: BlockMap

    def has_own_bounds(self, defaults: dict[str, Any]) -> bool:
        """Returns whether the group limits the ratio differently from the rest."""
        return any(self.group[name] != defaults[name] for name in ("min_coeff", "max_coeff"))

    def holds(self) -> Tensor:
        """Returns, per tensor, whether this parameter holds a fragment of it."""
        ones = torch.ones(1, self.block_map.num_blocks, dtype=torch.float64, device=self.param.device)
        return self.block_map.sums(ones)[0] > 0

    def advance_moments(self) -> Tensor:
        """Updates the moments; returns 2 x num_tensors fp64: the squared norms of weights and directions."""
        beta1, beta2 = self.group["betas"]
        squares = torch.zeros(2, self.block_map.num_blocks, dtype=torch.float64, device=self.param.device)
        grad = self.grad.contiguous().view(-1)
        if self.group.get("maximize", False):
            grad = -grad
        for start, weight, exp_avg, exp_avg_sq in self._chunks():
            chunk = grad[start : start + weight.numel()].to(exp_avg.dtype)
            exp_avg.lerp_(chunk, 1 - beta1)
            exp_avg_sq.mul_(beta2).addcmul_(chunk, chunk, value=1 - beta2)
            blocks = slice(start // BLOCK_NUMEL, -(-(start + weight.numel()) // BLOCK_NUMEL))
            block_squares(weight, squares[0, blocks])
            block_squares(self._direction(weight, exp_avg, exp_avg_sq), squares[1, blocks])
        return self.block_map.sums(squares)

    def apply(self, ratios: Tensor) -> None:
        """Subtracts the direction, times the learning rate and the ratio of each tensor, from the weights."""
        factors = self.block_map.spread(ratios.to(self.param.device, torch.float32))
        lr = self.group["lr"]
        lr = lr.item() if isinstance(lr, Tensor) else lr
        flat = self.param.contiguous().view(-1)
        for start, weight, exp_avg, exp_avg_sq in self._chunks(flat):
            direction = self._direction(weight, exp_avg, exp_avg_sq)
            multiply_blocks(direction, factors[start // BLOCK_NUMEL :])
            weight.add_(direction, alpha=-lr)  # in place, unless the weights had to be widened
            if weight.dtype is not flat.dtype:
                flat[start : start + weight.numel()].copy_(weight)
        if not self.param.is_contiguous():
            self.param.copy_(flat.view_as(self.param))

    def _chunks(self, flat: Tensor | None = None) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yields the start, weights in the dtype of the state, and moments of each cache-sized chunk."""
        flat = self.param.contiguous().view(-1) if flat is None else flat
        exp_avg, exp_avg_sq = (self.state[name].view(-1) for name in ("exp_avg", "exp_avg_sq"))
        numel = default_chunk_numel(self.param.device)
        for start in range(0, flat.numel(), numel):
            chunk = slice(start, start + numel)
            yield start, flat[chunk].to(exp_avg.dtype), exp_avg[chunk], exp_avg_sq[chunk]

    def _direction(self, weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
        beta1, beta2 = self.group["betas"]
        step = float(self.state["step"])
        corrected = self.group.get("bias_correction", True)
        correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
        eps = self.group["eps"]
        direction = scratch("lamb", weight.numel(), weight.dtype, weight.device)
        torch.mul(exp_avg_sq, 1 / correction2, out=direction)
        if self.group.get("eps_inside_sqrt", False):
            direction.add_(eps).sqrt_()
        else:
            direction.sqrt_().add_(eps)
        torch.div(exp_avg, direction, out=direction).div_(correction1)
        return direction.add_(weight, alpha=self.group["weight_decay"])


BLOCK_NUMEL = 64


class BlockMap:
    """Maps each block of a run to the tensor it belongs to. Fragments start at multiples of 64; the rest is padding.

    Raises:
        ValueError: A tensor does not start at a multiple of 64, in the run or of its own elements.
    """

    def __init__(
        self, fragments: tuple[TensorFragment, ...], numel: int, num_tensors: int, device: torch.device
    ) -> None:
        self.num_blocks = -(-numel // BLOCK_NUMEL)
        self._num_tensors = num_tensors
        owners: list[int] = []  # per range of blocks: the tensor, or num_tensors for a gap
        lengths: list[int] = []
        position = 0
        for fragment in fragments:
            if fragment.start % BLOCK_NUMEL or fragment.tensor_start % BLOCK_NUMEL:
                raise ValueError(
                    f"{fragment.name}: expected a fragment that starts at a multiple of {BLOCK_NUMEL} elements, in the "
                    f"run and in the tensor, found {fragment.start} and {fragment.tensor_start}; align it"
                )
            first, last = fragment.start // BLOCK_NUMEL, -(-fragment.stop // BLOCK_NUMEL)
            owners += [num_tensors, fragment.index]
            lengths += [first - position, last - first]
            position = last
        owners.append(num_tensors)
        lengths.append(self.num_blocks - position)
        self._owners = torch.tensor(owners, device=device)
        self._lengths = torch.tensor(lengths, device=device)

    def sums(self, block_values: Tensor) -> Tensor:
        """Sums ``block_values`` (``[rows, blocks]``, fp64) per tensor, in a fixed order: ``[rows, num_tensors]``."""
        sums = torch.segment_reduce(block_values.T.contiguous(), "sum", lengths=self._lengths, axis=0, unsafe=True)
        totals = block_values.new_zeros(self._num_tensors + 1, block_values.shape[0])
        # Each tensor has at most one range in a run, so this adds one value to a zero; only padding adds several.
        return totals.index_add_(0, self._owners, sums)[: self._num_tensors].T.contiguous()

    def most(self, block_values: Tensor) -> Tensor:
        """Returns the largest of ``block_values`` (``[blocks]``, fp64, not negative) per tensor: ``[num_tensors]``.

        0 for tensors without a block here.
        """
        totals = block_values.new_zeros(self._num_tensors + 1)
        owners = self._owners.repeat_interleave(self._lengths, output_size=self.num_blocks)
        return totals.scatter_reduce_(0, owners, block_values, "amax")[: self._num_tensors]

    def spread(self, per_tensor: Tensor) -> Tensor:
        """Copies one value per tensor (``[num_tensors]``) to its blocks: ``[blocks]``; padding gets 0."""
        with_padding = torch.cat([per_tensor, per_tensor.new_zeros(1)])
        return with_padding[self._owners].repeat_interleave(self._lengths, output_size=self.num_blocks)


def block_squares(flat: Tensor, out: Tensor) -> None:
    """Writes the squared norm of every block of ``flat`` (1-D; the last may be short) to ``out`` (fp64)."""
    complete = flat.numel() // BLOCK_NUMEL
    body = flat[: complete * BLOCK_NUMEL].view(complete, BLOCK_NUMEL)
    out[:complete] = torch.linalg.vector_norm(body, dim=1)
    if flat.numel() % BLOCK_NUMEL:
        out[complete] = torch.linalg.vector_norm(flat[complete * BLOCK_NUMEL :])
    out.square_()


def block_most(flat: Tensor) -> Tensor:
    """Returns the largest element of every block of ``flat`` (1-D; the last may be short), fp64."""
    complete = flat.numel() // BLOCK_NUMEL
    most = [flat[: complete * BLOCK_NUMEL].view(complete, BLOCK_NUMEL).amax(dim=1)] if complete else []
    if flat.numel() % BLOCK_NUMEL:
        most.append(flat[complete * BLOCK_NUMEL :].amax(dim=0, keepdim=True))
    return torch.cat(most).double() if most else flat.new_zeros(0, dtype=torch.float64)


def multiply_blocks(flat: Tensor, factors: Tensor) -> None:
    """Multiplies every block of ``flat`` (the last may be short) by its factor, in place."""
    complete = flat.numel() // BLOCK_NUMEL
    flat[: complete * BLOCK_NUMEL].view(complete, BLOCK_NUMEL).mul_(factors[:complete, None])
    if flat.numel() % BLOCK_NUMEL:
        flat[complete * BLOCK_NUMEL :].mul_(factors[complete])
