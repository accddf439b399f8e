"""Optimizers as their papers and torch define them, on whole parameters, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class _PerTensor(torch.optim.Optimizer):
    """Calls ``update`` for every parameter that has a gradient."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(group, param, param.grad, self.state[param])

    def update(self, group: dict[str, Any], p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_PerTensor):
    """Algorithm 2 of https://arxiv.org/abs/2302.06675."""

    def update(self, group: dict[str, Any], p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        beta1, beta2 = group["betas"]
        p -= group["lr"] * ((beta1 * m + (1 - beta1) * g).sign() + group["weight_decay"] * p)
        m.copy_(beta2 * m + (1 - beta2) * g)


class Lamb(_PerTensor):
    """Algorithm 2 of https://arxiv.org/abs/1904.00962 with the trust ratio between 0.01 and 10."""

    def update(self, group: dict[str, Any], p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
        m, v = (state.setdefault(name, torch.zeros_like(p)) for name in "mv")
        state["t"] = t = state.get("t", 0) + 1
        beta1, beta2 = group["betas"]
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g * g)
        direction = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"]) + group["weight_decay"] * p
        weight_norm, direction_norm = p.double().norm().item(), direction.double().norm().item()
        ratio = weight_norm / direction_norm if weight_norm > 0 and direction_norm > 0 else 1.0
        p -= group["lr"] * min(max(ratio, 0.01), 10.0) * direction


class Muon(_PerTensor):
    """https://kellerjordan.github.io/posts/muon for groups with ``use_muon``, AdamW for the others."""

    def update(self, group: dict[str, Any], p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
        if not group["use_muon"]:
            _adamw(group, p, g, state)
            return
        m = state.setdefault("m", torch.zeros_like(p))
        momentum = group["momentum"]
        m.copy_(momentum * m + (1 - momentum) * g)
        direction = _orthogonal((1 - momentum) * g + momentum * m)
        p *= 1 - group["lr"] * group["weight_decay"]
        p -= group["lr"] * math.sqrt(max(1.0, p.shape[0] / (p.numel() / p.shape[0]))) * direction


def _orthogonal(update: torch.Tensor) -> torch.Tensor:
    x = update.reshape(update.shape[0], -1)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.T if transposed else x).reshape(update.shape)


def _adamw(group: dict[str, Any], p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    m, v = (state.setdefault(name, torch.zeros_like(p)) for name in "mv")
    state["t"] = t = state.get("t", 0) + 1
    beta1, beta2 = group["betas"]
    p *= 1 - group["lr"] * group["weight_decay"]
    m.copy_(beta1 * m + (1 - beta1) * g)
    v.copy_(beta2 * v + (1 - beta2) * g * g)
    p -= group["lr"] * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"])


def muon_groups(model: nn.Module, groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Divides groups by hand: matrices that are no embedding or output layer go to Muon, all else to AdamW."""
    names = {id(p): name for name, p in model.named_parameters()}

    def is_matrix(p: torch.Tensor) -> bool:
        return p.dim() >= 2 and not any(word in names[id(p)] for word in ("embed", "lm_head"))

    for group in groups:
        for use_muon in (True, False):
            params = [p for p in group["params"] if is_matrix(p) is use_muon]
            if params:
                yield {**group, "params": params, "use_muon": use_muon}


Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# What a name of the matrix means, on groups of whole fp32 parameters. eps is large enough that the rounding of a tiny
# gradient does not decide the direction of a step.
REFERENCES: dict[str, Build] = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, eps=1e-6, foreach=False),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, eps=1e-6, foreach=False),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, foreach=False),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1, foreach=False),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, eps=1e-6, momentum=0.5, foreach=False),
    "Lion": lambda groups: Lion(groups, lr=0.01, betas=(0.9, 0.99)),
    "Lamb": lambda groups: Lamb(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-6),
    "Muon": lambda groups: Muon(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-6, momentum=0.95),
}
