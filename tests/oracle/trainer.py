"""The reference: what data-parallel training on several ranks means, in one process, one line per sentence.

Every rank's gradient is computed by the same copy of the model. Gradients are combined in fp32, in rank order. There
are no buckets, no shards and no collectives here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Gradients = dict[str, torch.Tensor]


class Scale:
    """The loss scale of fp16 by its rules: halve after ``hysteresis`` overflows, double after ``window`` good steps."""

    def __init__(self, value: float, *, dynamic: bool, window: int = 1000, hysteresis: int = 2) -> None:
        self.value = value
        self.dynamic = dynamic
        self.window = window
        self.patience = self.hysteresis = hysteresis
        self.good_steps = 0

    def after_step(self, overflow: bool) -> None:
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            self.patience -= 1
            if self.patience <= 0:
                self.value /= 2
                self.patience = 1
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.value *= 2
            self.good_steps = 0
            self.patience = self.hysteresis


class ReferenceTrainer:
    """Trains ``model`` as ``ranks`` data-parallel ranks would.

    Args:
        model: fp32; becomes the master weights.
        build_optimizer: Makes a torch optimizer from the master model.
        ranks: Simulated ranks.
        compute_dtype: Of forward and backward.
        wire_dtype: In which the gradient of one backward travels; a sum of several stays fp32.
        reduce_each_backward: Combine the ranks after every backward, then add up backwards (sharded gradients);
            otherwise each rank adds up its backwards first and the boundary combines the ranks.
        clip: Largest gradient norm; 0 is no clipping.
        scale: Loss scale, or None.
        autocast: Dtype of ``torch.autocast`` around forward, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        *,
        ranks: int,
        compute_dtype: torch.dtype = torch.float32,
        wire_dtype: torch.dtype | None = None,
        reduce_each_backward: bool,
        clip: float = 0.0,
        scale: Scale | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.masters = model
        self.model = copy.deepcopy(model).to(compute_dtype)
        self.optimizer = build_optimizer(model)
        self.ranks = ranks
        self.wire_dtype = wire_dtype or compute_dtype
        self.reduce_each_backward = reduce_each_backward or ranks == 1
        self.clip = clip
        self.scale = scale
        self.autocast = autocast
        self.norm = math.nan
        self.overflow = False
        self._waiting: list[Gradients] = [{} for _ in range(ranks)]  # per rank, not combined yet
        self._combined: Gradients = {}
        self._names = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def forward(self, batch: Any) -> Any:
        if self.autocast is None:
            return self.model(batch)
        with torch.autocast("cpu", dtype=self.autocast):
            return self.model(batch)

    def backward(self, losses: Sequence[torch.Tensor], *, boundary: bool, retain_graph: bool = False) -> None:
        """Runs one backward on every rank.

        Args:
            losses: One per rank.
            boundary: The update follows.
            retain_graph: As in torch.
        """
        factor = self.scale.value if self.scale else 1.0
        for rank, loss in enumerate(losses):
            found = torch.autograd.grad(
                loss * factor, list(self._names.values()), allow_unused=True, retain_graph=retain_graph
            )
            for name, gradient in zip(self._names, found, strict=True):
                if gradient is not None:
                    _add(self._waiting[rank], name, gradient.to(self.wire_dtype))
        if boundary or self.reduce_each_backward:
            self._combine()

    def _combine(self) -> None:
        for name in self._names:
            if not any(name in waiting for waiting in self._waiting):
                continue
            total = torch.zeros_like(self._names[name], dtype=torch.float32)
            for waiting in self._waiting:
                if name in waiting:  # a rank that did not use the parameter counts as zero
                    total += waiting[name]
            _add(self._combined, name, total * (1 / self.ranks))  # as the ranks do, to the last bit
        self._waiting = [{} for _ in range(self.ranks)]

    def step(self) -> None:
        """Unscales, computes the norm, checks for overflow, clips, updates, and publishes the weights."""
        scale = self.scale.value if self.scale else 1.0
        squares = sum(gradient.double().square().sum().item() for gradient in self._combined.values())
        self.overflow = not math.isfinite(squares)
        self.norm = math.sqrt(squares) / scale if not self.overflow else squares
        factor = 1.0 / scale
        if self.clip:
            factor *= min(1.0, self.clip / (self.norm + 1e-6))
        if not self.overflow:
            for name, master in self.masters.named_parameters():
                master.grad = self._combined[name] * factor if name in self._combined else None
            self.optimizer.step()
            self._publish()
        if self.scale:
            self.scale.after_step(self.overflow)
        self._combined = {}

    @torch.no_grad()
    def load(self, weights: Gradients) -> None:
        """Replaces the weights; keeps the optimizer's state."""
        for name, value in weights.items():
            self.masters.get_parameter(name).copy_(value)
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for compute, master in zip(self.model.parameters(), self.masters.parameters(), strict=True):
            compute.copy_(master)

    def weights(self) -> Gradients:
        """Returns a copy of the trained fp32 weights by name."""
        return {name: p.detach().clone() for name, p in self.masters.named_parameters() if p.requires_grad}


def _add(sums: Gradients, name: str, gradient: torch.Tensor) -> None:
    sums[name] = sums[name] + gradient.float() if name in sums else gradient.float()
