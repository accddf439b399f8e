"""Pruning by SNIP with momentum: keeps the weights that matter most to the loss; density falls during training.

The score of a weight is ``|w g|``, an estimate of how much the loss would change without it (SNIP, arXiv 1810.02340).
Scores are summed over updates with a momentum, as in Intel's Neural Compressor: ``score = 0.9 score + |w g|``. Weights
are pruned in blocks of rows and columns; a block's score is the mean of the scores of its weights. The blocks of all
layers are compared with each other, and each layer keeps at least 2 % of its own. After the k-th of ``K`` prunings the
density is ``dense_ratio ** (k / K)``, so it falls by the same factor each time. Pruned blocks stay pruned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.compression import rounding
from deepspeed.errors import CallOrderError
from deepspeed.zero.access.states import safe_get_full_sensitivity
from deepspeed.zero.address import address_of

MOMENTUM = 0.9
LEAST_KEPT = 0.02
"""Fraction of its blocks that every layer keeps at least."""
SCORES = "sparse_pruning_scores"
"""Name of the submodule of a layer that holds its scores."""


@dataclass(frozen=True)
class SnipPlan:
    """The schedule of SNIP pruning."""

    block: tuple[int, int]  # rows (outputs) and columns (inputs) of a block
    share: float  # fraction of the blocks that is kept in the end
    offset: int  # updates before the first pruning
    stride: int  # updates from one pruning to the next
    end: int  # the last update after which blocks may be pruned

    @classmethod
    def of(cls, shared: Any) -> SnipPlan:
        """Returns the plan of a section ``sparse_pruning.shared_parameters``."""
        rows, columns = map(int, shared.block_pattern.split("x"))
        end = shared.schedule_offset if shared.schedule_offset_end is None else shared.schedule_offset_end
        return cls((rows, columns), shared.dense_ratio, shared.schedule_offset, shared.schedule_offset_stride, end)

    @property
    def prunings(self) -> int:
        """The number of prunings."""
        return (self.end - self.offset) // self.stride + 1

    def fits(self, rows: int, columns: int) -> bool:
        """Returns whether a weight ``[rows, columns]`` can be divided into whole blocks."""
        return rows % self.block[0] == 0 and columns % self.block[1] == 0

    def share_after(self, step: int) -> float | None:
        """Returns the fraction kept by the pruning after ``step`` updates; None if no pruning is due then."""
        past = step - self.offset
        if past < 0 or step > self.end or past % self.stride:
            return None
        return float(self.share ** ((past // self.stride + 1) / self.prunings))

    def is_over(self, step: int) -> bool:
        """Returns whether the last pruning was done after ``step`` updates, so scores are no longer needed."""
        return step >= self.offset + (self.prunings - 1) * self.stride


class SnipScores(nn.Module):
    """Holds the scores of a layer's blocks, along the outputs and the inputs, in its state dict."""

    keeps_buffer_dtype = True  # in 16 bits, adding a small score to a large sum would lose it

    scores: torch.Tensor

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("scores", torch.zeros(rows, columns, dtype=torch.float32, device=device))


class SnipPruner:
    """Holds scores and masks of a model's layers; several may share a weight."""

    def __init__(self, plan: SnipPlan, layers: Iterable[Any]) -> None:
        self.plan = plan
        by_weight: dict[int, list[Any]] = {}
        for layer in layers:
            by_weight.setdefault(id(layer.weight), []).append(layer)
        self._layers = list(by_weight.values())
        self._fresh: list[torch.Tensor] | None = None

    @torch.no_grad()
    def score_gradients(self) -> None:
        """Computes the scores of this update from weights and gradients; :meth:`after_update` adds them.

        Call it after the last backward and before the update. Every rank must call it.
        """
        self._fresh = [self._of_blocks(users[0]) for users in self._layers]

    def _of_blocks(self, layer: Any) -> torch.Tensor:
        kept: torch.Tensor = layer.get_submodule(SCORES).scores
        weight = layer.weight
        if address_of(weight) is not None:
            product = safe_get_full_sensitivity(weight)
        else:
            product = None if weight.grad is None else (weight * weight.grad).abs()
        if product is None:
            return torch.zeros_like(kept)
        if layer.compression.is_transposed:
            product = product.t()
        rows, columns = self.plan.block
        return product.float().reshape(kept.shape[0], rows, kept.shape[1], columns).mean((1, 3))

    @torch.no_grad()
    def after_update(self, step: int) -> str | None:
        """Adds the scores of an applied update and prunes if due; CallOrderError if there are no scores."""
        if self._fresh is None:
            raise CallOrderError(
                "compression_scheduler.step: snip_momentum needs the gradients of the update; call "
                "compression_scheduler.before_update() after the backward and before optimizer.step()"
            )
        for users, fresh in zip(self._layers, self._fresh, strict=True):
            users[0].get_submodule(SCORES).scores.mul_(MOMENTUM).add_(fresh)
        self._fresh = None
        share = self.plan.share_after(step)
        return None if share is None else self._prune(share, step)

    def _prune(self, share: float, step: int) -> str:
        shares = []
        for users, kept in zip(self._layers, self._choose(share), strict=True):
            for layer in users:
                mask = layer.get_buffer(layer.compression.prunings["sparse"].buffer)
                spread = kept
                for dim, extent in enumerate(self.plan.block):
                    spread = spread.repeat_interleave(extent, dim)
                mask.copy_(spread.view(mask.shape))
            shares.append((kept.sum().item(), kept.numel()))
        total = sum(count for count, _ in shares) / sum(numel for _, numel in shares)
        ends = [count / numel for count, numel in shares]
        return (
            f"compression: from update {step:,} on {total:.3f} of the weights are kept by snip_momentum in {len(ends)} "
            f"layers ({min(ends):.3f} to {max(ends):.3f} of each)"
        )

    def _choose(self, share: float) -> list[torch.Tensor]:
        """Returns, for each weight, a mask ``[block rows, block columns]`` of the blocks that are kept."""
        ranked, sure = [], 0
        for users in self._layers:
            layer = users[0]
            scores = layer.get_submodule(SCORES).scores.clone()
            mask = layer.get_buffer(layer.compression.prunings["sparse"].buffer)
            rows, columns = self.plan.block
            scores[~mask.flatten(1)[::rows, ::columns]] = -torch.inf  # pruned already
            least = rounding.largest(scores, LEAST_KEPT)
            scores[least] = torch.inf
            sure += int(least.sum())
            ranked.append(scores)
        flat = torch.cat([scores.flatten() for scores in ranked])
        count = max(sure, rounding.kept_count(flat.numel(), share))
        chosen = torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
        chosen[flat.topk(count, sorted=False).indices] = True
        parts = chosen.split([scores.numel() for scores in ranked])
        return [part.view(scores.shape) for part, scores in zip(parts, ranked, strict=True)]
