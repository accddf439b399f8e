"""Block-sparse attention in torch's kernels.

There are three implementations with equal results:

- On a GPU, one kernel (``fused``).
- On the host, the stacks of tiles of the plan are gathered, processed by torch's fused kernel, and scattered back. Each
  stack is small enough for a core's cache. Backward gathers its operands again instead of saving them.
- If a bias needs a gradient, there is dropout, or neither kernel supports the tensors, autograd records the same stacks
  with ``scaled_dot_product_attention``.

In the first two, memory grows with the length of the sequence, not with the entries of the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from deepspeed.ops.sparse_attention.bias import Bias, split_dead
from deepspeed.ops.sparse_attention.fused import DTYPES, attend_fused, fits
from deepspeed.ops.sparse_attention.plan import STACK_TOKENS, HeadPlan, LayoutPlan, TileStack


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: LayoutPlan,
    *,
    scale: float | None = None,
    key_bias: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Computes softmax attention over the nonzero entries of a layout.

    The result equals that of dense attention with the layout as its mask.

    Args:
        query: ``[batch, heads, length, width]``, any floating dtype.
        key: In the shape of ``query``.
        value: In the shape of ``query``.
        plan: Plan of a layout of this length and these heads (or of one head, for all), on the tensors' device.
        scale: The scale of the scores; ``1 / sqrt(width)`` by default.
        key_bias: ``[batch, length]``, added to the scores of a key; ``-inf`` hides it.
        bias: ``[batch or 1, heads or 1, length, length]``, added to the scores; it may require a gradient.

    Returns:
        ``[batch, heads, length, width]``; rows that see nothing are zero.

    Raises:
        ValueError: Shapes or dtypes do not fit each other or the plan.
    """
    _check(query, key, value, plan)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    key_bias = None if key_bias is None else key_bias.to(query.dtype)
    bias = None if bias is None else bias.to(query.dtype)
    is_fusable = not (dropout > 0 or any(added is not None and added.requires_grad for added in (bias, key_bias)))
    if is_fusable and fits(query):
        return attend_fused(query, key, value, plan, scale=scale, key_bias=key_bias, bias=bias, is_causal=is_causal)
    added = Bias(key_bias, bias, is_causal, plan.block, query.dtype)
    if is_fusable and query.device.type == "cpu" and query.dtype in DTYPES and _HAS_KERNEL:
        return _HostAttention.apply(query.contiguous(), key.contiguous(), value.contiguous(), plan, added, scale)
    return _recorded(query, key, value, plan, added, scale, dropout)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: LayoutPlan) -> None:
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    if query.dim() != 4 or len(set(shapes)) > 1:
        raise ValueError(f"sparse attention: expected query, key and value of one shape [B, H, S, D]; found {shapes}")
    if len({tensor.dtype for tensor in (query, key, value)}) > 1:
        raise ValueError(
            f"sparse attention: query, key, value have dtypes {query.dtype}, {key.dtype}, {value.dtype}; expected one"
        )
    if query.size(2) != plan.length or plan.num_heads not in (1, query.size(1)):
        raise ValueError(
            f"sparse attention: the layout is for {plan.num_heads} heads and {plan.length} tokens; found "
            f"{query.size(1)} heads and {query.size(2)} tokens"
        )


def _heads_of(part: HeadPlan, plan: LayoutPlan, heads: int) -> Iterator[slice]:
    """Yields the heads of a part as slices: all at once, or one by one."""
    if plan.num_heads == 1 or len(part.heads) == heads:
        yield slice(0, heads)
    else:
        for head in part.heads:
            yield slice(head, head + 1)


def _blocks(tensor: torch.Tensor, batch: slice, heads: slice, plan: LayoutPlan) -> torch.Tensor:
    """Returns ``[n, blocks, block * width]`` of some heads of some samples: a view for one sample or for all heads."""
    part = tensor[batch, heads]
    return part.reshape(part.size(0) * part.size(1), plan.blocks, plan.block * tensor.size(-1))


def _take(blocks: torch.Tensor, which: torch.Tensor, tiles: int, width: int) -> torch.Tensor:
    """Gathers the blocks ``which`` of each tile: ``[n, tiles, tokens of a tile, width]``."""
    return blocks.index_select(1, which).view(blocks.size(0), tiles, -1, width)


def _spread(bias: torch.Tensor, samples: int, count: int, queries: int) -> torch.Tensor:
    """Returns ``[samples, heads, tiles, queries, keys]``, some 1, as ``[n or 1, tiles or 1, queries, keys]``."""
    batch, heads = bias.shape[:2]
    if batch * heads > 1:
        bias = bias.expand(samples, count // samples, *bias.shape[2:])
    flat = bias.flatten(0, 1)
    return flat.expand(flat.size(0), flat.size(1), queries, flat.size(3))


# --- torch's kernel for the host, stack by stack

_HAS_KERNEL = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu") and hasattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward"
)


def _stack_parts(plan: LayoutPlan, batch: int, heads: int) -> Iterator[tuple[TileStack, slice, slice]]:
    """Yields ``(stack, samples, heads)``: as many heads of as many samples at once as fill the cache."""
    for part in plan.by_heads:
        for group in _heads_of(part, plan, heads):
            for stack in part.stacks:
                at_once = max(1, STACK_TOKENS // (stack.columns.numel() * plan.block))
                width = group.stop - group.start
                if at_once >= width:
                    samples = at_once // width
                    for first in range(0, batch, samples):
                        yield stack, slice(first, min(first + samples, batch)), group
                    continue
                for sample in range(batch):
                    for head in range(group.start, group.stop, at_once):
                        yield stack, slice(sample, sample + 1), slice(head, min(head + at_once, group.stop))


class _HostAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: LayoutPlan,
        added: Bias,
        scale: float,
    ) -> torch.Tensor:
        output = torch.zeros_like(query)
        sums = []
        width = query.size(-1)
        for stack, batch, heads in _stack_parts(plan, query.size(0), query.size(1)):
            q, k, v = (_blocks(tensor, batch, heads, plan) for tensor in (query, key, value))
            taken = _take(q, stack.rows, stack.tiles, width)
            bias, dead = _masks(added, stack, batch, heads, taken)
            result, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                taken,
                _take(k, stack.columns, stack.tiles, width),
                _take(v, stack.columns, stack.tiles, width),
                0.0,
                False,
                attn_mask=bias,
                scale=scale,
            )
            if dead is not None:
                result = result.masked_fill(dead, 0.0)
            _put(output, result, stack, batch, heads, plan)
            sums.append(logsumexp)
        ctx.save_for_backward(query, key, value, output, *sums)
        ctx.plan, ctx.added, ctx.scale = plan, added, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        query, key, value, output, *sums = ctx.saved_tensors
        plan: LayoutPlan = ctx.plan
        gradient = gradient.contiguous()
        width = query.size(-1)
        to_query, to_key, to_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        for (stack, batch, heads), logsumexp in zip(
            _stack_parts(plan, query.size(0), query.size(1)), sums, strict=True
        ):
            g, q, k, v, o = (_blocks(tensor, batch, heads, plan) for tensor in (gradient, query, key, value, output))
            taken = _take(q, stack.rows, stack.tiles, width)
            arriving = _take(g, stack.rows, stack.tiles, width)
            bias, dead = _masks(ctx.added, stack, batch, heads, taken)
            if dead is not None:
                arriving = arriving.masked_fill(dead, 0.0)
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                arriving,
                taken,
                _take(k, stack.columns, stack.tiles, width),
                _take(v, stack.columns, stack.tiles, width),
                _take(o, stack.rows, stack.tiles, width),
                logsumexp,
                0.0,
                False,
                attn_mask=bias,
                scale=ctx.scale,
            )
            _put(to_query, dq, stack, batch, heads, plan)
            _add(to_key, dk, stack, batch, heads, plan)
            _add(to_value, dv, stack, batch, heads, plan)
        return to_query, to_key, to_value, None, None, None


def _masks(
    added: Bias, stack: TileStack, batch: slice, heads: slice, taken: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the kernel's mask and the rows that see nothing, both for ``taken``: ``[n, tiles, queries, ...]``."""
    bias = added.of_stack(stack, batch, heads)
    if bias is None:
        return None, None
    bias, dead = split_dead(bias)
    sizes = batch.stop - batch.start, taken.size(0), taken.size(2)
    return _spread(bias, *sizes), None if dead is None else _spread(dead, *sizes)


def _put(
    target: torch.Tensor, tiles: torch.Tensor, stack: TileStack, batch: slice, heads: slice, plan: LayoutPlan
) -> None:
    """Writes the rows of a stack to ``target``, of which ``batch, heads`` must be a contiguous part."""
    part = target[batch, heads].view(-1, plan.blocks, plan.block * target.size(-1))
    part.index_copy_(1, stack.rows, tiles.reshape(part.size(0), -1, part.size(2)))


def _add(
    target: torch.Tensor, tiles: torch.Tensor, stack: TileStack, batch: slice, heads: slice, plan: LayoutPlan
) -> None:
    """Adds to the columns of a stack in ``target``, see :func:`_put`."""
    part = target[batch, heads].view(-1, plan.blocks, plan.block * target.size(-1))
    part.index_add_(1, stack.columns, tiles.reshape(part.size(0), -1, part.size(2)))


# --- recorded by autograd


def _recorded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: LayoutPlan,
    added: Bias,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    samples, num_heads, length, width = query.shape
    batch = slice(0, samples)
    results: list[torch.Tensor] = []
    order: list[int] = []
    for part in plan.by_heads:
        for heads in _heads_of(part, plan, num_heads):
            q, k, v = (_blocks(tensor, batch, heads, plan) for tensor in (query, key, value))
            rows: list[torch.Tensor] = []
            found: list[torch.Tensor] = []
            for stack in part.stacks:
                taken = _take(q, stack.rows, stack.tiles, width)
                bias, dead = _masks(added, stack, batch, heads, taken)
                result = functional.scaled_dot_product_attention(
                    taken,
                    _take(k, stack.columns, stack.tiles, width),
                    _take(v, stack.columns, stack.tiles, width),
                    attn_mask=bias,
                    dropout_p=dropout,
                    scale=scale,
                )
                if dead is not None:
                    result = result.masked_fill(dead, 0.0)
                rows.append(stack.rows)
                found.append(result.reshape(q.size(0), -1, q.size(2)))
            rows.append(part.empty_rows)
            found.append(q.new_zeros(q.size(0), part.empty_rows.numel(), q.size(2)))
            back = torch.argsort(torch.cat(rows))
            in_order = torch.cat(found, 1).index_select(1, back)
            results.append(in_order.view(samples, -1, length, width))
            order += range(heads.start, heads.stop)
    if len(results) == 1:
        return results[0]
    joined = torch.cat(results, 1)
    return joined.index_select(1, torch.argsort(torch.tensor(order, device=joined.device)))
