"""A layout compiled into equal units of work.

Query blocks that attend to the same key blocks form one *tile*: their queries are multiplied with the keys together.
Tiles of the same size form a *stack*, which is one batched attention: gather queries, keys and values, compute
attention, scatter the rows back. Entries of the layout that are 0 are never computed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

#: Queries of a tile, where so many see the same keys. More make a longer list of stacks and no better matrix products.
TILE_TOKENS = 64
#: Tokens of keys that a stack gathers at most, unless one tile has more: 64-wide fp32 heads then fill a core's cache.
STACK_TOKENS = 4096


@dataclass(frozen=True)
class TileStack:
    """Equal tiles of one layout."""

    rows: torch.Tensor  # ``[tiles * rows of one]``, query blocks
    columns: torch.Tensor  # ``[tiles * columns of one]``, key blocks
    tiles: int  # their number
    # whether some tile attends to a key block at or after one of its query blocks, so that causality of tokens needs a
    # mask
    looks_ahead: bool

    def to(self, device: torch.device) -> TileStack:
        """Returns the same with its indices on ``device``."""
        return TileStack(self.rows.to(device), self.columns.to(device), self.tiles, self.looks_ahead)


@dataclass(frozen=True)
class HeadPlan:
    """The work of the heads that share a layout."""

    heads: tuple[int, ...]  # their numbers
    stacks: tuple[TileStack, ...]  # what is computed
    empty_rows: torch.Tensor  # query blocks that attend to nothing; their output is zero


@dataclass(frozen=True)
class LayoutPlan:
    """A compiled layout."""

    block: int  # tokens of a block's side
    blocks: int  # blocks of the sequence
    num_heads: int  # heads of the layout
    by_heads: tuple[HeadPlan, ...]  # the work; each head is in one entry
    visible: torch.Tensor  # bool, ``[heads, blocks, blocks]``, the layout
    # the layout as the fused kernel takes it, by whether it is causal; filled by ``fused.block_mask``
    masks: dict[bool, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self.block * self.blocks

    def to(self, device: torch.device) -> LayoutPlan:
        """Returns the same plan with its indices on ``device``."""
        moved = tuple(
            HeadPlan(part.heads, tuple(stack.to(device) for stack in part.stacks), part.empty_rows.to(device))
            for part in self.by_heads
        )
        return LayoutPlan(self.block, self.blocks, self.num_heads, moved, self.visible.to(device))


def compile_layout(layout: torch.Tensor, block: int) -> LayoutPlan:
    """Compiles a layout ``[(heads,) blocks, blocks]`` of any device. Raises ValueError: it has another shape."""
    if layout.dim() == 2:
        layout = layout.unsqueeze(0)
    if layout.dim() != 3 or layout.size(1) != layout.size(2):
        raise ValueError(f"layout of shape {tuple(layout.shape)}: expected [heads, blocks, blocks]")
    visible = layout.detach().to("cpu") != 0
    alike: dict[bytes, list[int]] = defaultdict(list)
    for head in range(visible.size(0)):
        alike[visible[head].numpy().tobytes()].append(head)
    parts = tuple(_plan_heads(tuple(heads), visible[heads[0]], block) for heads in alike.values())
    return LayoutPlan(block, visible.size(1), visible.size(0), parts, visible)


def _plan_heads(heads: tuple[int, ...], visible: torch.Tensor, block: int) -> HeadPlan:
    same_keys: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row in range(visible.size(0)):
        same_keys[tuple(visible[row].nonzero().flatten().tolist())].append(row)
    empty = same_keys.pop((), [])
    by_size: dict[tuple[int, int], list[tuple[list[int], tuple[int, ...]]]] = defaultdict(list)
    most = max(1, TILE_TOKENS // block)
    for columns, rows in same_keys.items():
        for first in range(0, len(rows), most):
            tile = rows[first : first + most]
            by_size[len(tile), len(columns)].append((tile, columns))
    stacks = []
    for (_, width), tiles in by_size.items():
        step = max(1, STACK_TOKENS // (width * block))
        stacks += [_stack(tiles[first : first + step]) for first in range(0, len(tiles), step)]
    return HeadPlan(heads, tuple(stacks), torch.tensor(empty, dtype=torch.int64))


def _stack(tiles: list[tuple[list[int], tuple[int, ...]]]) -> TileStack:
    rows = torch.tensor([row for tile, _ in tiles for row in tile], dtype=torch.int64)
    columns = torch.tensor([column for _, tile in tiles for column in tile], dtype=torch.int64)
    looks_ahead = any(max(columns_of) >= min(rows_of) for rows_of, columns_of in tiles)
    return TileStack(rows, columns, len(tiles), looks_ahead)
