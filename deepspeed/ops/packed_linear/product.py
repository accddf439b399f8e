"""The product of activations with a packed weight, and its gradient for the activations."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.ops.packed_linear.format import PackedFormat


def packed_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    out_features: int,
    how: PackedFormat,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ weight.t() + bias`` where the weight is packed.

    Args:
        x: ``[..., in_features]``, bfloat16, float16 or float32; the product is computed in this dtype.
        codes: As ``how`` makes them.
        scales: As ``how`` makes them.
        out_features: Of the weight.
        how: The format.
        bias: ``[out_features]`` or None.

    Returns:
        ``[..., out_features]`` in the dtype of ``x``. Gradients reach ``x`` and ``bias``; the weight is fixed.
    """
    flat = x.reshape(-1, x.shape[-1])
    product: torch.Tensor = _PackedLinear.apply(flat, codes, scales, out_features, how)  # type: ignore[no-untyped-call]
    if bias is not None:
        product = product + bias.to(product.dtype)
    return product.view(*x.shape[:-1], out_features)


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, out_features: int, how: PackedFormat
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.out_features, ctx.how = out_features, how
        if len(x) <= how.few_rows:
            product = how.kernel(x.contiguous(), codes, scales)
            if product is not None:
                return product[:, :out_features]
        out = x.new_empty(len(x), out_features)
        for part in how.columns(codes, scales, out_features, x.dtype):
            piece = torch.mm(x, part.weight, out=out[:, part.start : part.stop])
            if part.scale is not None:
                piece.mul_(part.scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        codes, scales = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        wanted = grad.new_zeros(len(grad), codes.shape[1], dtype=torch.float32)  # a sum of many products
        for part in ctx.how.columns(codes, scales, ctx.out_features, grad.dtype):
            piece = grad[:, part.start : part.stop]
            wanted += torch.mm(piece if part.scale is None else piece * part.scale, part.weight.t())
        return wanted.to(grad.dtype), None, None, None, None
