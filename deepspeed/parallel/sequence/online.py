"""Blockwise attention with an online softmax (Milakov and Gimelshein, arXiv 1805.02867).

Blocks of keys and values may come in any order, from other ranks (``ring``) or from host memory (``chunked``).
The state of a query after some blocks is its result so far and the logarithm of the sum of exponentials (``lse``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_TILE = 1024  # queries, and keys, per tile of scores


@dataclass(frozen=True)
class Tokens:
    """The tokens of the whole sequence in one block, kept on the host, so that reading them does not wait."""

    positions: torch.Tensor  # positions in the sequence, ``[tokens]``, ascending within runs
    # document number of each token, ``[batch, tokens]``, -1 for tokens that see nothing and are not seen; None: one
    # document
    documents: torch.Tensor | None = None

    def cut(self, start: int, stop: int) -> Tokens:
        """Returns the tokens ``start`` to ``stop`` of the block."""
        documents = None if self.documents is None else self.documents[:, start:stop]
        return Tokens(self.positions[start:stop], documents)

    def on(self, device: torch.device) -> Tokens:
        """Returns a copy on a device. The host does not wait."""
        return Tokens(_sent(self.positions, device), None if self.documents is None else _sent(self.documents, device))


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class MaskRule:
    """Describes which queries see which keys."""

    is_causal: bool  # tokens see no later ones
    window: int | None  # with ``is_causal``: tokens see themselves and the ``window - 1`` before them; None: all
    scale: float  # the scale of the scores

    def sees(self, query: Tokens, key: Tokens) -> bool | None:
        """Returns whether all queries see all keys (True), none sees any (False), or a mask is needed (None)."""
        sees: bool | None = True
        if self.is_causal:
            if int(query.positions.max()) < int(key.positions.min()):
                return False
            is_after = int(query.positions.min()) >= int(key.positions.max())
            sees = True if is_after and self.window is None else None
        return None if query.documents is not None and key.documents is not None else sees

    def hidden(self, query: Tokens, key: Tokens) -> torch.Tensor:
        """Returns True for hidden pairs, ``[batch or 1, 1, 1, queries, keys]``, on the device of the tokens.

        Only needed if :meth:`sees` returned None.
        """
        found: torch.Tensor | None = None
        if self.is_causal:
            after = query.positions[:, None] - key.positions
            found = after < 0
            if self.window is not None:
                found = found | (after >= self.window)
            found = found[None, None, None]
        if query.documents is not None and key.documents is not None:
            theirs = key.documents[:, None, :]
            other = ((query.documents[:, :, None] != theirs) | (theirs < 0))[:, None, None]
            found = other if found is None else found | other
        assert found is not None, "every query sees every key"
        return found


@dataclass
class Rows:
    """The attention of some queries so far: ``out`` in fp32 and ``lse``, ``-inf`` where nothing was seen."""

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(cls, query: torch.Tensor, width: int) -> Rows:
        """Returns the state before any key. ``query``: ``[batch, key heads, queries per key head, tokens, width]``."""
        out = query.new_zeros((*query.shape[:-1], width), dtype=torch.float32)
        return cls(out, query.new_full(query.shape[:-1], float("-inf"), dtype=torch.float32))

    def see(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Tokens, columns: Tokens, rule: MaskRule
    ) -> None:
        """Adds a block of keys and values, ``[batch, key heads, keys, width]``."""
        for (a, b), (c, d), hidden in _tiles(rows, columns, rule, key.device):
            scores = _scores(query[..., a:b, :], key[..., c:d, :], hidden, rule)
            lse = scores.logsumexp(-1)
            seen = torch.exp(scores - _finite(lse).unsqueeze(-1)) @ value[..., c:d, :].float().unsqueeze(2)
            before = self.lse[..., a:b]
            total = torch.logaddexp(before, lse)
            self.out[..., a:b, :] *= torch.exp(before - _finite(total)).unsqueeze(-1)
            self.out[..., a:b, :] += seen * torch.exp(lse - _finite(total)).unsqueeze(-1)
            self.lse[..., a:b] = total


@dataclass
class Slopes:
    """The backward of :class:`Rows`: gradients of queries, and of one block of keys and values after another."""

    query: torch.Tensor  # the query of the forward
    gradient: torch.Tensor  # the gradient of the result, in fp32
    lse: torch.Tensor  # the ``lse`` of the forward
    delta: torch.Tensor  # sum of gradient times result along the width
    of_query: torch.Tensor  # the gradient of the query so far

    def see(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        of_key: torch.Tensor,
        of_value: torch.Tensor,
        rows: Tokens,
        columns: Tokens,
        rule: MaskRule,
    ) -> None:
        """Adds the gradients of a block of keys and values to ``of_key`` and ``of_value``, and those of the queries.

        ``key`` is ``[batch, key heads, keys, width]``, ``value`` too, perhaps of another width; their gradients are
        fp32 in the same shapes. ``rows`` are the queries' tokens, ``columns`` the keys'.
        """
        for (a, b), (c, d), hidden in _tiles(rows, columns, rule, key.device):
            query, gradient = self.query[..., a:b, :], self.gradient[..., a:b, :]
            near, wide = key[..., c:d, :].float().unsqueeze(2), value[..., c:d, :].float().unsqueeze(2)
            scores = _scores(query, key[..., c:d, :], hidden, rule)
            shares = torch.exp(scores - _finite(self.lse[..., a:b]).unsqueeze(-1))
            of_value[..., c:d, :] += (shares.transpose(-1, -2) @ gradient).sum(2)
            slope = shares * (gradient @ wide.transpose(-1, -2) - self.delta[..., a:b].unsqueeze(-1)) * rule.scale
            self.of_query[..., a:b, :] += slope @ near
            of_key[..., c:d, :] += (slope.transpose(-1, -2) @ query.float()).sum(2)


def grouped(query: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Returns ``[batch, heads, ...]`` as ``[batch, key heads, heads per key head, ...]``."""
    return query.unflatten(1, (key_heads, -1))


def _tiles(
    rows: Tokens, columns: Tokens, rule: MaskRule, device: torch.device
) -> Iterator[tuple[tuple[int, int], tuple[int, int], torch.Tensor | None]]:
    """Yields the bounds of each tile in which something is seen, and its mask of hidden pairs; None: nothing is hidden.

    Masks are built on ``device``, to which the positions of the tokens are sent at most once.
    """
    there: tuple[Tokens, Tokens] | None = None
    for a in range(0, rows.positions.numel(), _TILE):
        b = min(a + _TILE, rows.positions.numel())
        for c in range(0, columns.positions.numel(), _TILE):
            d = min(c + _TILE, columns.positions.numel())
            sees = rule.sees(rows.cut(a, b), columns.cut(c, d))
            if sees is None:
                there = there if there is not None else (rows.on(device), columns.on(device))
                yield (a, b), (c, d), rule.hidden(there[0].cut(a, b), there[1].cut(c, d))
            elif sees:
                yield (a, b), (c, d), None


def _scores(query: torch.Tensor, key: torch.Tensor, hidden: torch.Tensor | None, rule: MaskRule) -> torch.Tensor:
    scores = (query.float() @ key.float().unsqueeze(2).transpose(-1, -2)) * rule.scale
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Replaces values of rows that saw no key by 0, so that exponentials of them are 0 and not NaN."""
    return torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
