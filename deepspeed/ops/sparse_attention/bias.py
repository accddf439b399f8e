"""Biases on the scores of a stack: key padding, masks, relative positions, causality of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed.logging import warn_once
from deepspeed.ops.sparse_attention.plan import TileStack


@dataclass(frozen=True)
class Bias:
    """All biases that are added to scores; ``-inf`` masks a score."""

    of_keys: torch.Tensor | None  # ``[batch, length]``, or None
    of_scores: torch.Tensor | None  # ``[batch or 1, heads or 1, length, length]``, or None
    is_causal: bool  # whether no token attends to later ones
    block: int  # tokens of a block's side
    dtype: torch.dtype  # the dtype of the scores

    def of_stack(self, stack: TileStack, batch: slice, heads: slice) -> torch.Tensor | None:
        """Returns ``[batch, heads, tiles, queries, keys]`` for a stack, any of the first three possibly 1.

        None if nothing is added.
        """
        found: torch.Tensor | None = None
        if self.of_scores is not None:
            found = self._scores(
                stack, self.of_scores[_cut(self.of_scores, 0, batch)][:, _cut(self.of_scores, 1, heads)]
            )
        if self.of_keys is not None:
            keys = self._keys(stack, self.of_keys[batch])
            found = keys if found is None else found + keys
        if self.is_causal and stack.looks_ahead:
            causal = self._causal(stack)
            found = causal if found is None else found + causal
        return found

    def _scores(self, stack: TileStack, scores: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = scores.shape
        blocks = length // self.block
        rows, columns = stack.rows.view(stack.tiles, -1, 1), stack.columns.view(stack.tiles, 1, -1)
        blocks_of_scores = scores.reshape(batch, heads, blocks, self.block, blocks, self.block).transpose(3, 4)
        found = blocks_of_scores[:, :, rows, columns]  # [batch, heads, tiles, rows, columns, block, block]
        return found.transpose(4, 5).reshape(
            batch, heads, stack.tiles, rows.size(1) * self.block, columns.size(2) * self.block
        )

    def _keys(self, stack: TileStack, keys: torch.Tensor) -> torch.Tensor:
        batch = keys.size(0)
        found = keys.reshape(batch, -1, self.block).index_select(1, stack.columns)
        return found.view(batch, 1, stack.tiles, 1, -1)

    def _causal(self, stack: TileStack) -> torch.Tensor:
        within = torch.arange(self.block, device=stack.rows.device)
        queries = (stack.rows.view(stack.tiles, -1, 1) * self.block + within).view(stack.tiles, -1, 1)
        keys = (stack.columns.view(stack.tiles, -1, 1) * self.block + within).view(stack.tiles, 1, -1)
        hidden = torch.zeros((), dtype=self.dtype, device=within.device).masked_fill(keys > queries, float("-inf"))
        return hidden.view(1, 1, stack.tiles, queries.size(1), keys.size(2))


def _cut(tensor: torch.Tensor, dimension: int, part: slice) -> slice:
    """Returns ``part``, or a full slice if the dimension has size 1 and is broadcast."""
    return slice(None) if tensor.size(dimension) == 1 else part


def split_dead(bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns a bias ``[..., queries, keys]`` without fully masked rows, and a mask of these rows.

    Softmax over a row of ``-inf`` is 0/0. Such a row is computed unmasked; the caller must set its output, and the
    gradient of the output, to zero.

    Returns:
        The bias, and a bool mask ``[..., queries, 1]``, or None if no row is fully masked.
    """
    dead = torch.isneginf(bias.detach().amax(-1, keepdim=True))
    if not bool(dead.any()):
        return bias, None
    return bias.masked_fill(dead, 0.0), dead


def position_bias(rpe: torch.Tensor, scores: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Returns relative positions ``[(batch, heads,) queries, keys]`` as 4-D, broadcasting to shape ``scores``.

    Raises:
        ValueError: The shape does not fit.
    """
    batch, heads, queries, keys = scores
    found = rpe.to(dtype)
    if rpe.dim() in (2, 3, 4):
        found = found.reshape((1,) * (4 - rpe.dim()) + tuple(rpe.shape))
        if found.size(0) in (1, batch) and found.size(1) in (1, heads) and found.shape[2:] == (queries, keys):
            return found
    raise ValueError(
        f"sparse attention, rpe: expected [{queries}, {keys}], [{heads} or 1, {queries}, {keys}] or [{batch} or 1, "
        f"{heads} or 1, {queries}, {keys}] for these queries and keys, found {list(rpe.shape)}. Reshape or cut it"
    )


def additive(mask: torch.Tensor, mode: str, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns what a mask (any shape) adds to scores: its values (``add``), or -inf where it is 0 (``mul``)."""
    if mode == "mul":
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask == 0, float("-inf"))
    if mask.dtype == torch.bool:
        warn_once(
            f"sparse attention, boolean {name}",
            f"sparse attention: {name} is boolean and its mode is 'add', so 0 or 1 is added to scores and nothing is "
            f"hidden. Pass {name}_mode='mul' to hide where it is False, or a mask of 0 and -inf",
        )
    return mask.to(dtype)
