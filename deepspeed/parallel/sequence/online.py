"""Blockwise attention with an online softmax (Milakov and Gimelshein, arXiv 1805.02867).

Blocks of keys and values may come in any order, from other ranks (``ring``) or from host memory (``chunked``).
The state of a query after some blocks is its result so far and the logarithm of the sum of exponentials (``lse``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from deepspeed.parallel.sequence.block_kernels import attend_to_block, block_gradients, finite, sum_dtype, tile_of


@dataclass(frozen=True)
class Tokens:
    """The tokens of the whole sequence in one block, kept on the host, so that reading them does not wait."""

    positions: torch.Tensor  # positions in the sequence, ``[tokens]``, ascending
    # document number of each token, ``[batch, tokens]``, -1 for tokens that see nothing and are not seen; None: one
    # document
    documents: torch.Tensor | None = None

    def cut(self, some: slice) -> Tokens:
        """Returns some of the tokens."""
        return Tokens(self.positions[some], None if self.documents is None else self.documents[:, some])

    def on(self, device: torch.device) -> Tokens:
        """Returns a copy on a device. The host does not wait."""
        return Tokens(_sent(self.positions, device), None if self.documents is None else _sent(self.documents, device))


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Block:
    """Some queries and some keys, as ranges of tokens.

    ``kind`` is ``"full"``: all of them see all, ``"causal"``: the i-th query sees the first i + 1 keys, as many, or
    ``"masked"``.
    """

    rows: slice
    columns: slice
    kind: Literal["full", "causal", "masked"]

    def moved(self, rows: int, columns: int) -> Block:
        """Returns the block ``rows`` queries and ``columns`` keys further on."""
        there, across = (slice(x.start + by, x.stop + by) for x, by in ((self.rows, rows), (self.columns, columns)))
        return Block(there, across, self.kind)


@dataclass(frozen=True)
class MaskRule:
    """Describes which queries see which keys."""

    is_causal: bool  # tokens see no later ones
    window: int | None  # with ``is_causal``: tokens see themselves and the ``window - 1`` before them; None: all
    scale: float  # the scale of the scores

    def blocks(self, query: Tokens, key: Tokens) -> Iterator[Block]:
        """Yields blocks of the pairs that see each other, at most two.

        Causal attention of a query has a block of earlier keys, and one around its own position.
        """
        rows, columns = query.positions, key.positions
        has_documents = query.documents is not None and key.documents is not None
        a, b, c, d = 0, rows.numel(), 0, columns.numel()
        if self.is_causal and b and d:
            a = int(torch.searchsorted(rows, columns[0]))
            d = int(torch.searchsorted(columns, rows[-1], right=True))
            if self.window is not None and a < b and d:
                b = int(torch.searchsorted(rows, columns[d - 1] + self.window))
                c = int(torch.searchsorted(columns, rows[a] - self.window, right=True))
        if a >= b or c >= d:
            return
        is_in_window = self.window is None or int(rows[b - 1] - columns[c]) < self.window
        if has_documents or not is_in_window:
            yield Block(slice(a, b), slice(c, d), "masked")
            return
        earlier = int(torch.searchsorted(rows, columns[d - 1], right=True)) if self.is_causal else 0
        if a < earlier:
            is_square = torch.equal(rows[a:earlier], columns[c:d])
            yield Block(slice(a, earlier), slice(c, d), "causal" if is_square else "masked")
        if max(a, earlier) < b:
            yield Block(slice(max(a, earlier), b), slice(c, d), "full")

    def hidden(self, query: Tokens, key: Tokens) -> torch.Tensor:
        """Returns True for hidden pairs, ``[batch or 1, 1, queries, keys]``, on the device of the tokens.

        Only needed for blocks that are ``"masked"``.
        """
        found: torch.Tensor | None = None
        if self.is_causal:
            after = query.positions[:, None] - key.positions
            found = after < 0
            if self.window is not None:
                found = found | (after >= self.window)
            found = found[None, None]
        if query.documents is not None and key.documents is not None:
            theirs = key.documents[:, None, :]
            other = ((query.documents[:, :, None] != theirs) | (theirs < 0))[:, None]
            found = other if found is None else found | other
        assert found is not None, "every query sees every key"
        return found


@dataclass
class Rows:
    """The attention of some queries so far: ``out`` and ``lse`` in fp32, ``-inf`` where nothing was seen."""

    query: torch.Tensor  # ``[batch, heads, tokens, width]``
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(cls, query: torch.Tensor, width: int) -> Rows:
        """Returns the state of ``query`` before any key; ``width`` is that of the values."""
        out = query.new_zeros((*query.shape[:-1], width), dtype=sum_dtype(query))
        return cls(query, out, out.new_full(query.shape[:-1], float("-inf")))

    def see(self, key: torch.Tensor, value: torch.Tensor, rows: Tokens, columns: Tokens, rule: MaskRule) -> None:
        """Adds keys and values, ``[batch, key heads, keys, width]``, in the dtype of the query."""
        for block, hidden in _blocks(self.query, key, value, rows, columns, rule):
            query, near, wide = self.query[:, :, block.rows], key[:, :, block.columns], value[:, :, block.columns]
            out, lse = attend_to_block(query, near, wide, rule.scale, is_causal=block.kind == "causal", hidden=hidden)
            before = self.lse[:, :, block.rows]
            share = torch.sigmoid(lse - before).nan_to_num_()  # NaN: nothing was seen, before and now
            self.out[:, :, block.rows].lerp_(out.to(self.out.dtype), share.unsqueeze(-1))
            self.lse[:, :, block.rows] = torch.logaddexp(before, lse)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the attention in the query's dtype, and ``lse`` with 0 where nothing was seen."""
        return self.out.to(self.query.dtype), finite(self.lse)


class Slopes:
    """The backward of :class:`Rows`: gradients of queries, and of keys and values by one block after another.

    ``out`` and ``lse`` are as :meth:`Rows.result` returned them, ``gradient`` is that of ``out``.

    Attributes:
        of_query: The gradient of the query so far, in fp32.
    """

    def __init__(self, query: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        self._query, self._gradient, self._out, self._lse = query, gradient, out, lse
        self.of_query = torch.zeros_like(query, dtype=sum_dtype(query))

    def see(
        self, key: torch.Tensor, value: torch.Tensor, rows: Tokens, columns: Tokens, rule: MaskRule
    ) -> Iterator[tuple[slice, Sequence[torch.Tensor]]]:
        """Yields ranges of keys with the gradients of key and value there, to be summed; adds those of the queries.

        ``key`` is ``[batch, key heads, keys, width]``, ``value`` too, perhaps of another width. ``rows`` are the
        queries' tokens, ``columns`` the keys'.
        """
        for block, hidden in _blocks(self._query, key, value, rows, columns, rule):
            gradient, query, out, lse = (
                x[:, :, block.rows] for x in (self._gradient, self._query, self._out, self._lse)
            )
            near, wide = key[:, :, block.columns], value[:, :, block.columns]
            of_query, *found = block_gradients(
                gradient, query, near, wide, out, lse, rule.scale, is_causal=block.kind == "causal", hidden=hidden
            )
            self.of_query[:, :, block.rows].add_(of_query)
            yield block.columns, found


def add_at(tokens: slice, parts: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> None:
    """Adds tensors to a range of tokens of ``[batch, heads, tokens, width]`` each."""
    for whole, part in zip(sums, parts, strict=True):
        whole[:, :, tokens].add_(part)


def _blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Tokens, columns: Tokens, rule: MaskRule
) -> Iterator[tuple[Block, torch.Tensor | None]]:
    """Yields the blocks in which something is seen, each with its mask of hidden pairs; None: it needs no mask.

    Masks are built on the device, to which the positions of the tokens are sent at most once.
    """
    if not query.numel() or not key.numel():
        return
    there: tuple[Tokens, Tokens] | None = None
    is_in_window = rule.window is None or int(rows.positions[-1] - columns.positions[0]) < rule.window
    side = tile_of(query, key, value, has_masks=rows.documents is not None or not is_in_window)
    sides = side or query.size(2), side or key.size(2)
    for a, c in itertools.product(range(0, query.size(2), sides[0]), range(0, key.size(2), sides[1])):
        for inside in rule.blocks(rows.cut(slice(a, a + sides[0])), columns.cut(slice(c, c + sides[1]))):
            block, hidden = inside.moved(a, c), None
            if block.kind == "masked":
                there = there if there is not None else (rows.on(key.device), columns.on(key.device))
                hidden = rule.hidden(there[0].cut(block.rows), there[1].cut(block.columns))
            yield block, hidden
