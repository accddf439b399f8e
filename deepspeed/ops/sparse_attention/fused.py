"""Block-sparse attention as one kernel, on GPUs: torch's ``flex_attention``, compiled for the device.

The kernel works on tiles of 128 x 128 scores. It skips a tile that the layout hides, computes one that the layout shows
whole without a mask, and masks each score of the others. The blocks of the layout may have any size.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.logging import warn_once
from deepspeed.ops.sparse_attention.plan import LayoutPlan
from deepspeed.uncompiled import uncompiled

if TYPE_CHECKING:  # its import loads the compiler
    from torch.nn.attention.flex_attention import BlockMask

#: Tokens of a tile's side.
TILE = 128
#: The narrowest heads that the kernel multiplies.
LEAST_WIDTH = 16
#: Dtypes of torch's fused attention, on GPUs and on the CPU.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fits(query: torch.Tensor) -> bool:
    """Returns whether the kernel can be compiled for the device, the dtype and the width of ``query``, 4-D."""
    is_known = query.device.type == "cuda" and query.dtype in DTYPES and query.size(3) >= LEAST_WIDTH
    return is_known and _can_compile()


@functools.cache
def _can_compile() -> bool:
    compilers = shlex.split(os.environ.get("CC", ""))[:1] or ["cc", "gcc", "clang"]
    if importlib.util.find_spec("triton") is None:
        missing = "the package triton is not installed"
    elif not any(map(shutil.which, compilers)):
        missing = f"there is no C compiler ({' or '.join(compilers)}), which Triton needs"
    elif torch.cuda.get_device_capability() < (7, 0):
        missing = "this GPU is older than those that Triton supports (compute capability 7.0)"
    else:
        return True
    warn_once(
        "sparse attention without a fused kernel",
        f"sparse attention: {missing}; it runs as many small operations, which take many times as long",
    )
    return False


def attend_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: LayoutPlan,
    *,
    scale: float,
    key_bias: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Computes softmax attention over the entries of a layout, with the arguments of ``attention.attend``.

    The first call compiles the kernel, which takes some seconds. Values of hidden keys are multiplied with 0 where
    their tile is shown in part, so they must be finite.

    Args:
        query: ``[batch, heads, length, width]``, fp32, bf16 or fp16, on a GPU.
        key: In the shape of ``query``.
        value: In the shape of ``query``.
        key_bias: ``[batch, length]``, added to the scores of a key; without a gradient.
        bias: ``[batch or 1, heads or 1, length, length]``, added to the scores; without a gradient.
    """
    batch, heads, length, _ = query.shape
    if bias is not None:
        bias = bias.expand(batch, heads, length, length)
    mask = block_mask(plan, is_causal=is_causal)
    return _kernel()(query, key, value, score_mod=_added(key_bias, bias), block_mask=mask, scale=scale)


@functools.cache
def _kernel() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)  # type: ignore[no-any-return]


def _added(key_bias: torch.Tensor | None, bias: torch.Tensor | None) -> Callable[..., torch.Tensor] | None:
    """Returns what changes a score, with the signature that ``flex_attention`` requires."""
    if key_bias is not None and bias is not None:
        return lambda score, batch, head, row, column: score + bias[batch, head, row, column] + key_bias[batch, column]
    if bias is not None:
        return lambda score, batch, head, row, column: score + bias[batch, head, row, column]
    if key_bias is not None:
        return lambda score, batch, head, row, column: score + key_bias[batch, column]
    return None


@uncompiled
def block_mask(plan: LayoutPlan, *, is_causal: bool) -> BlockMask:
    """Returns the layout's tiles, on the device of ``plan``; made once for each plan."""
    if is_causal not in plan.masks:
        plan.masks[is_causal] = _block_mask(plan, is_causal)
    return plan.masks[is_causal]  # type: ignore[no-any-return]


def _block_mask(plan: LayoutPlan, is_causal: bool) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    is_shared = len(plan.by_heads) == 1  # all heads have one layout
    visible, length = plan.visible[:1] if is_shared else plan.visible, plan.length
    tokens = torch.arange(length, device=visible.device)
    # A tensor instead of a division by the block size: flex_attention refuses numbers that differ between calls.
    block_of = tokens // plan.block
    shares = torch.zeros(-(-length // TILE), plan.blocks, device=visible.device)  # tokens of a block in a tile
    shares.index_put_((tokens // TILE, block_of), torch.ones((), device=visible.device), accumulate=True)
    seen = shares @ visible.to(shares.dtype) @ shares.T  # [heads, tiles, tiles], visible scores of each tile
    shown, unmasked = seen > 0, seen == TILE * TILE
    if is_causal:
        shown, unmasked = shown.tril(), unmasked.tril(-1)

    def is_visible(head: Any, row: Any, column: Any) -> Any:
        return visible[0 if is_shared else head, block_of[row], block_of[column]]

    def of_all(_batch: Any, head: Any, row: Any, column: Any) -> Any:
        return is_visible(head, row, column)

    def of_earlier(_batch: Any, head: Any, row: Any, column: Any) -> Any:
        return is_visible(head, row, column) & (row >= column)

    return BlockMask.from_kv_blocks(
        *_listed(shown & ~unmasked),
        *_listed(unmasked),
        BLOCK_SIZE=TILE,
        mask_mod=of_earlier if is_causal else of_all,
        seq_lengths=(length, length),
    )


def _listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how many ``tiles`` ``[heads, rows, columns]`` of each row are True, and its columns, these first.

    Both int32, ``[1, heads, rows]`` and ``[1, heads, rows, columns]``.
    """
    columns = torch.argsort(tiles.to(torch.int8), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32).unsqueeze(0), columns.to(torch.int32).unsqueeze(0)
