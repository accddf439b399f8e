"""Orthogonalising a matrix by Newton-Schulz iterations.

Five steps of a quintic polynomial push every singular value towards 1 (`K. Jordan et al.
<https://kellerjordan.github.io/posts/muon/>`_; the coefficients make small singular values grow fastest at the price
of ending anywhere in about 0.7 to 1.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

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
        num_steps: Iterations.
        is_stack: ``matrix`` is a stack of matrices, 3-D or more: each one of the last two dimensions is orthogonalised
            by itself, all in one batch.

    Returns:
        A tensor of the shape of ``matrix``, fp32.

    Raises:
        ValueError: Fewer than 2 dimensions (3 of a stack), or an unknown method.
    """
    if matrix.dim() < (3 if is_stack else 2):
        what = "stacks of matrices" if is_stack else "matrices"
        raise ValueError(f"only {what} can be orthogonalised, but the shape is {tuple(matrix.shape)}")
    if method not in METHODS:
        raise ValueError(f"ns_method must be one of {', '.join(METHODS)}, but is {method!r}")
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
    """X' = P X with P = aI + bA + cA^2 and A = X X^T; all P commute with A, so A' = P A P and the P can be gathered."""
    a, b, c = _COEFFICIENTS
    gram = wide @ wide.mT
    gathered: Tensor | None = None
    for step in range(num_steps):
        polynomial = _add_product(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        gathered = polynomial if gathered is None else polynomial @ gathered
        if step + 1 < num_steps:
            gram = polynomial @ gram @ polynomial
            # Rounding makes it slightly unsymmetric, which the next steps would amplify.
            gram = (gram + gram.mT).mul_(0.5)
    return wide if gathered is None else gathered @ wide


def _add_product(addend: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """Returns ``beta * addend + alpha * left @ right``, of matrices or of stacks of them."""
    product = torch.addmm if left.dim() == 2 else torch.baddbmm
    return product(addend, left, right, beta=beta, alpha=alpha)
