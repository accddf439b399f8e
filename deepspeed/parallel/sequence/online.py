"""Attention block by block, with the softmax put together as blocks come (Milakov and Gimelshein, arXiv 1805.02867).

Keys and values may come in any order and from anywhere: from other ranks (``ring``), from host memory (``chunked``).
What is known of a row after some blocks is its result so far and the logarithm of the sum of its exponentials.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_TILE = 1024  # queries and keys whose scores exist at once


@dataclass(frozen=True)
class Tokens:
    """Which tokens of the whole sequence the rows of a block are; on the host, so that asking does not wait.

    Attributes:
        places: Places in the sequence, ``[tokens]``, ascending within runs.
        documents: Number of the document of each token, ``[batch, tokens]``, -1 for tokens that see nothing and are
            seen by nobody; None: all are one.
    """

    places: torch.Tensor
    documents: torch.Tensor | None = None

    def cut(self, start: int, stop: int) -> Tokens:
        """Some of the rows."""
        documents = None if self.documents is None else self.documents[:, start:stop]
        return Tokens(self.places[start:stop], documents)


@dataclass(frozen=True)
class Rule:
    """Who sees whom.

    Attributes:
        is_causal: Tokens see none that come later.
        window: With ``is_causal``: tokens see themselves and the ``window - 1`` before them; None: all.
        scale: Of the scores.
    """

    is_causal: bool
    window: int | None
    scale: float

    def hidden(self, query: Tokens, key: Tokens) -> torch.Tensor | bool:
        """What is hidden: everything (True), nothing (False), or by ``[batch or 1, 1, 1, queries, keys]``."""
        found: torch.Tensor | bool = False
        if self.is_causal:
            if int(query.places.max()) < int(key.places.min()):
                return True
            ahead = int(query.places.min()) >= int(key.places.max())
            if not ahead or self.window is not None:
                after = query.places[:, None] - key.places
                found = after < 0
                if self.window is not None:
                    found = found | (after >= self.window)
                found = found[None, None, None]
        if query.documents is not None and key.documents is not None:
            theirs = key.documents[:, None, :]
            other = ((query.documents[:, :, None] != theirs) | (theirs < 0))[:, None, None]
            found = other if found is False else found | other
        return found


@dataclass
class Rows:
    """What is known of some queries: ``out`` in fp32 and ``lse``, ``-inf`` where nothing was seen."""

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(cls, query: torch.Tensor, width: int) -> Rows:
        """Nothing seen yet. ``query`` is ``[batch, key heads, queries per key head, tokens, width]``."""
        out = query.new_zeros((*query.shape[:-1], width), dtype=torch.float32)
        return cls(out, query.new_full(query.shape[:-1], float("-inf"), dtype=torch.float32))

    def see(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Tokens, columns: Tokens, rule: Rule
    ) -> None:
        """Takes a block of keys and values ``[batch, key heads, keys, width]`` in."""
        for (a, b), (c, d), hidden in _tiles(rows, columns, rule):
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
    """The backward of :class:`Rows`: gradients of queries, and of one block of keys and values after another.

    Attributes:
        query: As the forward had it.
        gradient: Of the result, in fp32.
        lse: What the forward found.
        delta: Sum of gradient times result along the width.
        of_query: What is asked for; the sum so far.
    """

    query: torch.Tensor
    gradient: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    of_query: torch.Tensor

    def see(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        of_key: torch.Tensor,
        of_value: torch.Tensor,
        rows: Tokens,
        columns: Tokens,
        rule: Rule,
    ) -> None:
        """Adds what a block of keys and values gets to ``of_key`` and ``of_value`` (fp32)."""
        for (a, b), (c, d), hidden in _tiles(rows, columns, rule):
            query, gradient = self.query[..., a:b, :], self.gradient[..., a:b, :]
            near, wide = key[..., c:d, :].float().unsqueeze(2), value[..., c:d, :].float().unsqueeze(2)
            scores = _scores(query, key[..., c:d, :], hidden, rule)
            shares = torch.exp(scores - _finite(self.lse[..., a:b]).unsqueeze(-1))
            of_value[..., c:d, :] += (shares.transpose(-1, -2) @ gradient).sum(2)
            slope = shares * (gradient @ wide.transpose(-1, -2) - self.delta[..., a:b].unsqueeze(-1)) * rule.scale
            self.of_query[..., a:b, :] += slope @ near
            of_key[..., c:d, :] += (slope.transpose(-1, -2) @ query.float()).sum(2)


def grouped(query: torch.Tensor, key_heads: int) -> torch.Tensor:
    """``[batch, heads, ...]`` as ``[batch, key heads, heads per key head, ...]``."""
    return query.unflatten(1, (key_heads, -1))


def _tiles(
    rows: Tokens, columns: Tokens, rule: Rule
) -> Iterator[tuple[tuple[int, int], tuple[int, int], torch.Tensor | bool]]:
    for a in range(0, rows.places.numel(), _TILE):
        b = min(a + _TILE, rows.places.numel())
        for c in range(0, columns.places.numel(), _TILE):
            d = min(c + _TILE, columns.places.numel())
            hidden = rule.hidden(rows.cut(a, b), columns.cut(c, d))
            if hidden is not True:
                yield (a, b), (c, d), hidden


def _scores(query: torch.Tensor, key: torch.Tensor, hidden: torch.Tensor | bool, rule: Rule) -> torch.Tensor:
    scores = (query.float() @ key.float().unsqueeze(2).transpose(-1, -2)) * rule.scale
    return scores if isinstance(hidden, bool) else scores.masked_fill(hidden.to(scores.device), float("-inf"))


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """0 in the place of what nothing was seen for, so that exponentials of it are 0 and not NaN."""
    return torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
