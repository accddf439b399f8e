"""Patterns of block-sparse attention: which query block attends to which key blocks.

A *layout* is an ``int64`` tensor on the host of shape ``[heads, blocks, blocks]``, ``blocks = length / block``; entry
``[h, r, c]`` is 1 if, in head ``h``, query block ``r`` attends to key block ``c``. A custom pattern is a subclass of
:class:`SparsityConfig` with a ``make_layout``.

``unidirectional`` applies to blocks: a query block attends to all of its own key block. Causality of tokens is left to
the caller (``is_causal`` of :class:`~deepspeed.ops.sparse_attention.sparse_self_attention.SparseSelfAttention`).

Sources: Sparse Transformers (arXiv 1904.10509), BigBird (arXiv 2007.14062), Longformer (arXiv 2004.05150).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from typing_extensions import override

BIDIRECTIONAL = "bidirectional"
UNIDIRECTIONAL = "unidirectional"


class SparsityConfig:
    """Base class of all patterns.

    Args:
        block: Tokens of a block's side.
        different_layout_per_head: A layout for each head; otherwise all heads have that of the first.

    Raises:
        ValueError: A number is not positive.
    """

    _fitting: tuple[str, ...] = ()  #: attributes with numbers of blocks that a sequence must have

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        if num_heads < 1 or block < 1:
            raise ValueError(f"num_heads={num_heads}, block={block}: expected positive numbers; correct them")
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> torch.Tensor:
        """Returns a layout of zeros. Raises ValueError: ``seq_len`` is not a multiple of ``block``."""
        if seq_len % self.block:
            raise ValueError(
                f"make_layout({seq_len}): expected a multiple of the block size {self.block}; pad the "
                f"sequences to {-(-seq_len // self.block) * self.block} (SparseAttentionUtils.pad_to_block_size)"
            )
        blocks = seq_len // self.block
        return torch.zeros((self.num_heads, blocks, blocks), dtype=torch.int64)

    @property
    def _least_blocks(self) -> int:
        """Number of blocks of the shortest sequence for which there is a layout."""
        return max([1, *(getattr(self, name) for name in self._fitting)])

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """Returns the layout for ``seq_len`` tokens; subclasses implement it."""
        raise NotImplementedError(f"{type(self).__name__}.make_layout: not implemented; define it in the subclass")

    def check_and_propagate_first_head_layout(self, layout: torch.Tensor) -> torch.Tensor:
        """Copies the first head's layout to all heads, unless each has its own.

        ``layout`` is ``[heads, blocks, blocks]``.
        """
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout


def _check_attention(attention: str) -> None:
    if attention not in (BIDIRECTIONAL, UNIDIRECTIONAL):
        raise NotImplementedError(f"attention={attention!r}: expected {BIDIRECTIONAL!r} or {UNIDIRECTIONAL!r}")


def _check_horizontal(attention: str, horizontal: bool) -> None:
    if horizontal and attention != BIDIRECTIONAL:
        raise ValueError(
            f"horizontal_global_attention: expected attention={BIDIRECTIONAL!r}, found {attention!r}; change either"
        )


def _check_fits(what: str, number: int, blocks: int) -> None:
    if blocks < number:
        raise ValueError(f"{what}={number}: expected at most the {blocks} blocks of the sequence; lower it")


def _global_ranges(indices: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int]]:
    """Returns the ``[start, end)`` of every global range."""
    if ends is None:
        return [(index, index + 1) for index in indices]
    if len(ends) != len(indices):
        raise ValueError(
            f"global_block_end_indices has {len(ends)} entries, global_block_indices {len(indices)}; expected as many"
        )
    for start, end in zip(indices, ends, strict=True):
        if start >= end:
            raise ValueError(f"global blocks {start} to {end}: expected an end after the start")
    return list(zip(indices, ends, strict=True))


def _within(ranges: Sequence[tuple[int, int]], blocks: int) -> Iterator[tuple[int, int]]:
    for start, end in ranges:
        yield (start, end) if start >= 0 else (max(start + blocks, 0), max(end + blocks, 0) if end <= 0 else end)


def _set_window(layout: torch.Tensor, before: int, after: int) -> None:
    """Sets a window in one head's layout: ``before`` blocks before each block, the block, and ``after`` after it."""
    rows = torch.arange(layout.size(0))
    distance = rows.unsqueeze(0) - rows.unsqueeze(1)
    layout[(distance >= -before) & (distance <= after)] = 1


def _set_local(layout: torch.Tensor, starts: Sequence[int], attention: str) -> None:
    for start, end in zip(starts, starts[1:], strict=False):
        window = torch.ones((end - start, end - start), dtype=layout.dtype)
        layout[start:end, start:end] |= window.tril() if attention == UNIDIRECTIONAL else window


class DenseSparsityConfig(SparsityConfig):
    """Every block attends to every block; for comparisons."""

    @override
    def make_layout(self, seq_len: int) -> torch.Tensor:
        return self.setup_layout(seq_len).fill_(1)


class FixedSparsityConfig(SparsityConfig):
    """Local windows, and global blocks (the last blocks of each window) to which every block attends.

    Args:
        num_local_blocks: Blocks of a window.
        num_global_blocks: Global blocks of a window; a divisor of ``num_local_blocks``.
        attention: ``bidirectional`` or ``unidirectional``.
        horizontal_global_attention: Whether global blocks also attend to every block.
        num_different_global_patterns: Number of different choices of global blocks, which heads use in turn.

    Raises:
        ValueError: The numbers of blocks or of patterns do not go together.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = BIDIRECTIONAL,
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        if num_local_blocks < 1 or num_global_blocks < 1 or num_local_blocks % num_global_blocks:
            raise ValueError(
                f"num_local_blocks={num_local_blocks}: expected a multiple of num_global_blocks={num_global_blocks}; "
                "change one of them"
            )
        _check_attention(attention)
        _check_horizontal(attention, horizontal_global_attention)
        if num_different_global_patterns > 1 and not different_layout_per_head:
            raise ValueError(
                f"num_different_global_patterns={num_different_global_patterns}: expected "
                "different_layout_per_head=True, found False; set it, or use 1"
            )
        most = num_local_blocks // num_global_blocks
        if num_different_global_patterns > most:
            raise ValueError(
                f"num_different_global_patterns={num_different_global_patterns}: windows of {num_local_blocks} blocks "
                f"with {num_global_blocks} global ones have at most {most}"
            )
        self.num_local_blocks = num_local_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = attention
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = num_different_global_patterns

    @override
    def make_layout(self, seq_len: int) -> torch.Tensor:
        layout = self.setup_layout(seq_len)
        blocks = layout.size(1)
        starts = [*range(0, blocks, self.num_local_blocks), blocks]
        for head in range(self.num_layout_heads):
            _set_local(layout[head], starts, self.attention)
            for first in self._global_starts(head, blocks):
                columns = slice(first, first + self.num_global_blocks)
                first_row = first if self.attention == UNIDIRECTIONAL else 0
                layout[head, first_row:, columns] = 1
                if self.horizontal_global_attention:
                    layout[head, columns, :] = 1
        return self.check_and_propagate_first_head_layout(layout)

    def _global_starts(self, head: int, blocks: int) -> list[int]:
        length, width = self.num_local_blocks, self.num_global_blocks
        offset = length - (1 + head % self.num_different_global_patterns) * width
        complete = blocks - blocks % length
        starts = list(range(offset, complete, length))
        if complete < blocks:
            starts.append(max(0, min(complete + offset, blocks - width)))
        return starts


class VariableSparsityConfig(SparsityConfig):
    """Local windows of configurable sizes, selected global blocks, and random blocks.

    Args:
        num_random_blocks: Blocks per row drawn from all columns by Python's ``random``, also when unidirectional.
        local_window_blocks: Sizes of the windows in blocks; the last one repeats. Default ``[4]``.
        global_block_indices: Global blocks, negative ones from the end; those beyond the sequence are left out. Default
            ``[0]``.
        global_block_end_indices: Where given, the global blocks are ``[index, end)``.
        attention: ``bidirectional`` or ``unidirectional``.
        horizontal_global_attention: Whether global blocks also attend to every block.

    Raises:
        ValueError: A window has no blocks.
    """

    _fitting = ("num_random_blocks",)

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] | None = None,
        global_block_indices: Sequence[int] | None = None,
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = BIDIRECTIONAL,
        horizontal_global_attention: bool = False,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _check_attention(attention)
        _check_horizontal(attention, horizontal_global_attention)
        if any(size < 1 for size in local_window_blocks or ()):
            raise ValueError(f"local_window_blocks={local_window_blocks}: expected positive sizes; correct them")
        self.num_random_blocks = num_random_blocks
        self.local_window_blocks = [4] if local_window_blocks is None else list(local_window_blocks)
        self.global_block_indices = [0] if global_block_indices is None else list(global_block_indices)
        self.global_block_end_indices = global_block_end_indices
        self._ranges = _global_ranges(self.global_block_indices, global_block_end_indices)
        self.attention = attention
        self.horizontal_global_attention = horizontal_global_attention

    @override
    def make_layout(self, seq_len: int) -> torch.Tensor:
        layout = self.setup_layout(seq_len)
        blocks = layout.size(1)
        _check_fits("num_random_blocks", self.num_random_blocks, blocks)
        starts = [0]
        sizes = list(self.local_window_blocks)
        while sizes and starts[-1] < blocks:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            starts.append(min(starts[-1] + size, blocks))
        for head in range(self.num_layout_heads):
            for row in range(blocks):
                layout[head, row, random.sample(range(blocks), self.num_random_blocks)] = 1
            _set_local(layout[head], starts, self.attention)
            for first, end in _within(self._ranges, blocks):
                first_row = first if self.attention == UNIDIRECTIONAL else 0
                layout[head, first_row:, first:end] = 1
                if self.horizontal_global_attention:
                    layout[head, first:end, :] = 1
        return self.check_and_propagate_first_head_layout(layout)


class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, random blocks, and the first blocks as global ones.

    Args:
        num_random_blocks: Blocks per row, drawn by Python's ``random``; at most 1 where unidirectional, because the
            first row has one block to choose from.
        num_sliding_window_blocks: Width of the window, the own block in its middle.
        num_global_blocks: Number of first blocks that attend to all blocks, and to which all attend.
        attention: ``bidirectional`` or ``unidirectional``.
    """

    _fitting = ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks")

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = BIDIRECTIONAL,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _check_attention(attention)
        self.num_random_blocks = num_random_blocks
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = attention

    @override
    def make_layout(self, seq_len: int) -> torch.Tensor:
        layout = self.setup_layout(seq_len)
        blocks = layout.size(1)
        is_causal = self.attention == UNIDIRECTIONAL
        _check_fits("num_random_blocks", self.num_random_blocks, blocks)
        if is_causal and self.num_random_blocks > 1:
            raise ValueError(
                f"num_random_blocks={self.num_random_blocks}: unidirectional rows draw from the blocks up to their "
                "own, and the first row has one; expected at most 1"
            )
        _check_fits("num_sliding_window_blocks", self.num_sliding_window_blocks, blocks)
        _check_fits("num_global_blocks", self.num_global_blocks, blocks)
        width = self.num_sliding_window_blocks // 2
        for head in range(self.num_layout_heads):
            for row in range(blocks):
                columns = range(row + 1) if is_causal else range(blocks)
                layout[head, row, random.sample(columns, self.num_random_blocks)] = 1
            _set_window(layout[head], width, width)
            layout[head, : self.num_global_blocks, :] = 1
            layout[head, :, : self.num_global_blocks] = 1
            if is_causal:
                layout[head] = layout[head].tril()
        return self.check_and_propagate_first_head_layout(layout)


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and selected global blocks that attend to all blocks, and to which all attend.

    Args:
        num_sliding_window_blocks: Width of the window, the own block in its middle.
        global_block_indices: Global blocks, negative ones from the end; those beyond the sequence are left out. Default
            ``[0]``.
        global_block_end_indices: Where given, the global blocks are ``[index, end)``.
        attention: ``bidirectional`` or ``unidirectional``.
    """

    _fitting = ("num_sliding_window_blocks",)

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] | None = None,
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = BIDIRECTIONAL,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _check_attention(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.global_block_indices = [0] if global_block_indices is None else list(global_block_indices)
        self.global_block_end_indices = global_block_end_indices
        self._ranges = _global_ranges(self.global_block_indices, global_block_end_indices)
        self.attention = attention

    @override
    def make_layout(self, seq_len: int) -> torch.Tensor:
        layout = self.setup_layout(seq_len)
        blocks = layout.size(1)
        _check_fits("num_sliding_window_blocks", self.num_sliding_window_blocks, blocks)
        width = self.num_sliding_window_blocks // 2
        for head in range(self.num_layout_heads):
            _set_window(layout[head], width, width)
            for first, end in _within(self._ranges, blocks):
                layout[head, first:end, :] = 1
                layout[head, :, first:end] = 1
            if self.attention == UNIDIRECTIONAL:
                layout[head] = layout[head].tril()
        return self.check_and_propagate_first_head_layout(layout)


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window alone, the same for every head.

    Args:
        num_sliding_window_blocks: Width of the window in both directions, the own block in its middle.
        attention: ``unidirectional`` or ``bidirectional``.
    """

    _fitting = ("num_sliding_window_blocks",)

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: str = UNIDIRECTIONAL,
    ) -> None:
        super().__init__(num_heads, block)
        _check_attention(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.attention = attention

    @override
    def make_layout(self, seq_len: int) -> torch.Tensor:
        layout = self.setup_layout(seq_len)
        _check_fits("num_sliding_window_blocks", self.num_sliding_window_blocks, layout.size(1))
        width = self.num_sliding_window_blocks // 2
        _set_window(layout[0], width, 0 if self.attention == UNIDIRECTIONAL else width)
        return self.check_and_propagate_first_head_layout(layout)
