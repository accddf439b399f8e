"""References: the published patterns computed entry by entry, and dense attention under a mask."""

import math
import random

import torch

from deepspeed.ops.sparse_attention import compile_layout
from deepspeed.ops.sparse_attention.fused import attend_fused


def layout_of(config, seq_len):
    """The layout by the definition of each pattern: loops over rows and columns."""
    name = type(config).__name__
    blocks = seq_len // config.block
    heads = config.num_heads if config.different_layout_per_head else 1
    made = [_DEFINITIONS[name](config, head, blocks) for head in range(heads)]
    return torch.tensor(made if heads > 1 else made * config.num_heads)


def _zeros(blocks):
    return [[0] * blocks for _ in range(blocks)]


def _is_causal(config):
    return config.attention == "unidirectional"


def _dense(config, head, blocks):
    return [[1] * blocks for _ in range(blocks)]


def _windows(seen, bounds, is_causal):
    for first, end in bounds:
        for row in range(first, end):
            for column in range(first, (row + 1) if is_causal else end):
                seen[row][column] = 1


def _fixed(config, head, blocks):
    seen, length, width = _zeros(blocks), config.num_local_blocks, config.num_global_blocks
    _windows(seen, [(e, min(e + length, blocks)) for e in range(0, blocks, length)], _is_causal(config))
    offset = length - (1 + head % config.num_different_global_patterns) * width
    for first in range(0, blocks, length):
        start = first + offset
        if first + length > blocks:
            start = min(start, blocks - width)
        for column in range(max(start, 0), max(start, 0) + width):
            for row in range(blocks):
                if not _is_causal(config) or row >= start:
                    seen[row][column] = 1
                if config.horizontal_global_attention:
                    seen[column][row] = 1
    return seen


def _variable(config, head, blocks):
    seen = _zeros(blocks)
    for row in range(blocks):
        for column in random.sample(range(blocks), config.num_random_blocks):
            seen[row][column] = 1
    bounds, first, sizes = [], 0, list(config.local_window_blocks)
    while first < blocks:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        bounds.append((first, min(first + size, blocks)))
        first += size
    _windows(seen, bounds, _is_causal(config))
    ends = config.global_block_end_indices or [index + 1 for index in config.global_block_indices]
    for start, end in zip(config.global_block_indices, ends, strict=True):
        for column in range(start, min(end, blocks)):
            for row in range(blocks):
                if not _is_causal(config) or row >= start:
                    seen[row][column] = 1
                if config.horizontal_global_attention:
                    seen[column][row] = 1
    return seen


def _big_bird(config, head, blocks):
    seen, width = _zeros(blocks), config.num_sliding_window_blocks // 2
    for row in range(blocks):
        columns = range(row + 1) if _is_causal(config) else range(blocks)
        for column in random.sample(columns, config.num_random_blocks):
            seen[row][column] = 1
    for row in range(blocks):
        for column in range(blocks):
            near = abs(row - column) <= width
            if near or row < config.num_global_blocks or column < config.num_global_blocks:
                seen[row][column] = 1
            if _is_causal(config) and column > row:
                seen[row][column] = 0
    return seen


def _longformer(config, head, blocks):
    seen, width = _zeros(blocks), config.num_sliding_window_blocks // 2
    ends = config.global_block_end_indices or [index + 1 for index in config.global_block_indices]
    chosen = {b for start, end in zip(config.global_block_indices, ends, strict=True) for b in range(start, end)}
    for row in range(blocks):
        for column in range(blocks):
            if abs(row - column) <= width or row in chosen or column in chosen:
                seen[row][column] = 1
            if _is_causal(config) and column > row:
                seen[row][column] = 0
    return seen


def _sliding(config, head, blocks):
    seen, width = _zeros(blocks), config.num_sliding_window_blocks // 2
    for row in range(blocks):
        for column in range(blocks):
            after = 0 if _is_causal(config) else width
            seen[row][column] = int(-width <= column - row <= after)
    return seen


_DEFINITIONS = {
    "DenseSparsityConfig": _dense,
    "FixedSparsityConfig": _fixed,
    "VariableSparsityConfig": _variable,
    "BigBirdSparsityConfig": _big_bird,
    "BSLongformerSparsityConfig": _longformer,
    "LocalSlidingWindowSparsityConfig": _sliding,
}


def masked_dense(query, key, value, layout, block, *, scale=None, key_bias=None, bias=None, is_causal=False):
    """Attention under the mask that the layout is; rows that see nothing are zero."""
    visible = layout.bool().repeat_interleave(block, 1).repeat_interleave(block, 2)[None]
    scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if key_bias is not None:
        scores = scores + key_bias[:, None, None]
    hidden = ~visible
    if is_causal:
        hidden = hidden | torch.ones(scores.shape[-2:], device=scores.device).triu(1).bool()
    scores = scores.masked_fill(hidden, float("-inf"))
    dead = torch.isneginf(scores.amax(-1, keepdim=True))
    return torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0) @ value


def fused_beside_dense(config, length, dtype, device, *, is_causal=False, is_biased=False):
    """Returns the fused kernel's output and three gradients, and those of dense attention in fp64, as two lists.

    On the CPU only the outputs: ``flex_attention`` has no backward there.
    """
    torch.manual_seed(0)
    random.seed(0)
    layout = config.make_layout(length)
    shape = 2, config.num_heads, length, 16
    has_backward = device != "cpu"
    query, key, value = (torch.randn(shape).to(device, dtype).requires_grad_(has_backward) for _ in range(3))
    gradient = torch.randn(shape).to(device, dtype)
    added = {}
    if is_biased:
        added = {"bias": torch.randn(1, 1, length, length), "key_bias": torch.zeros(2, length)}
        added["key_bias"][0, length // 2 :] = float("-inf")
        added = {name: tensor.to(device, dtype) for name, tensor in added.items()}
    plan = compile_layout(layout, config.block).to(torch.device(device))
    ours = attend_fused(query, key, value, plan, scale=0.3, is_causal=is_causal, **added)
    exact = [tensor.detach().double().requires_grad_(has_backward) for tensor in (query, key, value)]
    added = {name: tensor.double() for name, tensor in added.items()}
    dense = masked_dense(*exact, layout.to(device), config.block, scale=0.3, is_causal=is_causal, **added)
    found, expected = [ours], [dense]
    if has_backward:
        found += torch.autograd.grad(ours, [query, key, value], gradient)
        expected += torch.autograd.grad(dense, exact, gradient.double())
    return [tensor.detach().cpu() for tensor in found], [tensor.detach().cpu() for tensor in expected]
