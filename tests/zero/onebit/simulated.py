"""The published algorithms by definition: all ranks in one process, one tensor operation for a line of the papers."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.engine import DeepSpeedEngine


class Message:
    """What travels together: the trained tensors of one bucket, one after the other, cut into slices of whole bytes."""

    def __init__(self, names: list[str], numels: list[int], ranks: int) -> None:
        self.names, self.numels, self.ranks = names, numels, ranks
        self.numel = sum(numels)
        self.part = math.ceil(self.numel / (8 * ranks)) * 8
        self.sent = [torch.zeros(self.numel) for _ in range(ranks)]
        slices = [self.slice_of(rank) for rank in range(ranks)]
        self.owned = [torch.zeros(len(range(self.numel)[part])) for part in slices]
        self.cut = 0  # elements that were more than they may be

    def slice_of(self, rank: int) -> slice:
        return slice(min(rank * self.part, self.numel), min((rank + 1) * self.part, self.numel))

    def exchange(
        self, vectors: list[torch.Tensor], unit: torch.Tensor | None = None, most: float = math.inf
    ) -> torch.Tensor:
        """The compressed all-reduce of ``vectors / unit``, at most ``most``, times it; errors are kept in no unit."""
        unit = torch.ones(self.numel) if unit is None else unit
        if self.ranks == 1:
            return self.limited(vectors[0] / unit, most) * unit
        coded = []
        for rank, vector in enumerate(vectors):
            due = self.limited((vector + self.sent[rank]) / unit, most)
            coded.append(compressed(due))
            self.sent[rank] = (due - coded[-1]) * unit
        found = []
        for rank in range(self.ranks):
            part = self.slice_of(rank)
            mean = sum(one[part] for one in coded) / self.ranks + self.owned[rank] / unit[part]
            mean = self.limited(mean, most)
            found.append(compressed(mean))
            self.owned[rank] = (mean - found[-1]) * unit[part]
        return torch.cat(found) * unit

    def limited(self, values: torch.Tensor, most: float) -> torch.Tensor:
        self.cut += int((values.abs() > most).sum())
        return values.clamp(-most, most)


def most_of_adam(beta1: float, beta2: float) -> float:
    """What Adam moves at most for a learning rate of 1: after the gradients ``(beta1 / beta2) ** age``."""
    gradients = [(beta1 / beta2) ** age for age in range(300)]
    momentum = sum((1 - beta1) * beta1**age * gradient for age, gradient in enumerate(gradients))
    variance = sum((1 - beta2) * beta2**age * gradient**2 for age, gradient in enumerate(gradients))
    return momentum / math.sqrt(variance)


def compressed(values: torch.Tensor) -> torch.Tensor:
    """``|values| / sqrt(d)`` with the signs, of which that of 0 is +."""
    if values.numel() == 0:
        return values
    scale = values.norm() / math.sqrt(values.numel())
    return torch.where(values >= 0, scale, -scale)


def messages_of(engine: DeepSpeedEngine, ranks: int) -> list[Message]:
    """The messages of an engine: how parameters are laid out is its own affair."""
    made = []
    for master in engine._runtime.masters:
        tiles = [tile for tile in master.layout.tiles if tile.param_group >= 0 and tile.numel]
        made.append(Message([tile.name for tile in tiles], [tile.numel for tile in tiles], ranks))
    return made


def unit_of(message: Message, variance: dict[str, torch.Tensor], eps: float) -> torch.Tensor:
    """What an update divides momentum by, in the order of a message."""
    return torch.cat([variance[name].sqrt().reshape(-1) + eps for name in message.names])


class OneBitAdam:
    """1-bit Adam, algorithm 1 of arXiv 2102.02888, over ranks and micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        messages: list[Message],
        *,
        freeze: int,
        lr: float,
        decay: float = 0.0,
        eps: float = 1e-8,
        clip: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        precondition: bool = False,
    ) -> None:
        self.precondition = precondition
        self.model = copy.deepcopy(model).float()
        self.messages, self.ranks = messages, messages[0].ranks
        self.freeze, self.lr, self.decay, self.eps, self.clip, self.betas = freeze, lr, decay, eps, clip, betas
        self.at = dict(self.model.named_parameters())
        self.m = {name: torch.zeros_like(p) for name, p in self.at.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.at.items()}
        self.masks: dict[str, torch.Tensor] = {}
        self.norm = 0.0
        self.count = 0

    def gradients(self, losses: Callable[[nn.Module, int], torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        found = []
        for rank in range(self.ranks):
            self.model.zero_grad()
            losses(self.model, rank).backward()
            found.append({name: p.grad.clone() for name, p in self.at.items() if p.grad is not None})
        return found

    @torch.no_grad()
    def step(self, by_rank: list[dict[str, torch.Tensor]]) -> None:
        """One update from each rank's own gradients."""
        self.count += 1
        if self.count <= self.freeze:
            mean = {name: sum(g[name] for g in by_rank) / self.ranks for name in by_rank[0]}
            self.norm = math.sqrt(sum(g.double().square().sum().item() for g in mean.values()))
            factor = min(1.0, self.clip / (self.norm + 1e-6)) if self.clip else 1.0
            for name, gradient in mean.items():
                self.m[name] = self.betas[0] * self.m[name] + (1 - self.betas[0]) * gradient * factor
                self.v[name] = self.betas[1] * self.v[name] + (1 - self.betas[1]) * (gradient * factor).square()
        else:
            self.travel(by_rank)
        for name, parameter in self.at.items():
            if name in by_rank[0]:
                self.move(name, parameter)

    def travel(self, by_rank: list[dict[str, torch.Tensor]]) -> None:
        beta = self.betas[0]
        # Fewer elements than the sums that stand for them, so that what the engine estimates is exact.
        mean = {name: sum(g[name] for g in by_rank) / self.ranks for name in by_rank[0]}
        self.norm = math.sqrt(sum(g.double().square().sum().item() for g in mean.values()))
        factor = min(1.0, self.clip / (self.norm + 1e-6)) if self.clip else 1.0
        for message in self.messages:
            vectors = []
            for rank in range(self.ranks):
                own = [beta * self.m[n] + (1 - beta) * factor * by_rank[rank][n] for n in message.names]
                own = [self.sent(name, m) for name, m in zip(message.names, own, strict=True)]
                masked = [m * self.masks.get(n, 1) for n, m in zip(message.names, own, strict=True)]
                vectors.append(torch.cat([m.reshape(-1) for m in masked]))
            unit = unit_of(message, self.v, self.eps) if self.precondition else None
            most = most_of_adam(*self.betas) if self.precondition else math.inf
            parts = message.exchange(vectors, unit, most).split(message.numels)
            for name, part in zip(message.names, parts, strict=True):
                self.m[name] = self.received(name, part.view_as(self.m[name])) * self.masks.get(name, 1)
            self.clear_masked(message)

    def sent(self, name: str, momentum: torch.Tensor) -> torch.Tensor:
        return momentum

    def received(self, name: str, momentum: torch.Tensor) -> torch.Tensor:
        return momentum

    def clear_masked(self, message: Message) -> None:
        """Where momentum is masked nothing is owed."""
        if not any(name in self.masks for name in message.names):
            return
        flat = torch.cat(
            [
                self.masks.get(name, torch.ones(numel)).reshape(-1)
                for name, numel in zip(message.names, message.numels, strict=True)
            ]
        )
        for rank in range(self.ranks):
            message.sent[rank] *= flat
            message.owned[rank] *= flat[message.slice_of(rank)]

    def move(self, name: str, parameter: torch.Tensor) -> None:
        parameter.mul_(1 - self.lr * self.decay)
        parameter.sub_(self.lr * self.m[name] / (self.v[name].sqrt() + self.eps))


class OneBitLamb(OneBitAdam):
    """1-bit LAMB, algorithm 1 of arXiv 2104.06069."""

    bounds, coeff_beta, factor_bounds, threshold = (0.01, 10.0), 0.9, (0.5, 4.0), 0.1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scaling = dict.fromkeys(self.at, 1.0)
        self.average = dict.fromkeys(self.at, 0.0)
        self.last = dict.fromkeys(self.at, 1.0)
        self.before: dict[str, torch.Tensor] = {}
        self.fresh: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, by_rank: list[dict[str, torch.Tensor]]) -> None:
        if self.count == self.freeze:
            roots = {name: m.square().mean().sqrt().item() for name, m in self.m.items()}
            mean = sum(roots.values()) / len(roots)
            self.scaling = {name: mean / root for name, root in roots.items()}
            self.fresh = {name: v.clone() for name, v in self.v.items()}
        self.before = {name: m.clone() for name, m in self.m.items()}
        super().step(by_rank)

    def sent(self, name: str, momentum: torch.Tensor) -> torch.Tensor:
        return momentum * self.scaling[name]

    def received(self, name: str, momentum: torch.Tensor) -> torch.Tensor:
        return momentum / self.scaling[name]

    def move(self, name: str, parameter: torch.Tensor) -> None:
        m, root = self.m[name], self.v[name].sqrt() + self.eps
        plain = m / root
        update = plain + self.decay * parameter
        if self.count <= self.freeze:
            sizes = parameter.norm().item(), update.norm().item()
            ratio = sizes[0] / sizes[1] if min(sizes) > 0 else 1.0
            ratio = min(max(ratio, self.bounds[0]), self.bounds[1])
            if ratio != 1.0:
                self.average[name] = self.coeff_beta * self.average[name] + (1 - self.coeff_beta) * ratio
        else:
            gradient = (m - self.betas[0] * self.before[name]) / (1 - self.betas[0])
            self.fresh[name] = self.betas[1] * self.fresh[name] + (1 - self.betas[1]) * gradient.square()
            factor = (root / (self.fresh[name].sqrt() + self.eps)).max().item()
            share = min(1.0, plain.norm().item() / update.norm().item())
            factor = factor * share + 1 - share
            factor = min(max(factor, self.factor_bounds[0]), self.factor_bounds[1])
            last = self.last[name]
            self.last[name] = min(max(factor, (1 - self.threshold) * last), (1 + self.threshold) * last)
            ratio = (self.average[name] or 1.0) * self.last[name]
        parameter.sub_(self.lr * ratio * update)


class ZeroOneAdam:
    """0/1 Adam, algorithm 1 of arXiv 2202.06009, with its policies of section 4; the variance is updated first."""

    def __init__(
        self,
        model: nn.Module,
        messages: list[Message],
        *,
        freeze: int,
        kappa: int,
        double_after: int,
        most: int,
        lr: float,
        decay: float,
        eps: float,
        clip: float,
        precondition: bool = False,
        correct: bool = False,
    ) -> None:
        self.precondition, self.correct = precondition, correct
        self.messages, self.ranks = messages, messages[0].ranks
        self.models = [copy.deepcopy(model).float() for _ in range(self.ranks)]
        self.at = [dict(one.named_parameters()) for one in self.models]
        self.lr, self.decay, self.eps, self.clip = lr, decay, eps, clip
        self.freeze, self.double_after, self.most = freeze, double_after, most
        self.v = {name: torch.zeros_like(p) for name, p in self.at[0].items()}
        self.m = [{name: torch.zeros_like(p) for name, p in self.at[0].items()} for _ in range(self.ranks)]
        self.u = [{name: torch.zeros_like(p) for name, p in self.at[0].items()} for _ in range(self.ranks)]
        self.anchor = {name: p.detach().clone() for name, p in self.at[0].items()}
        self.variance, number, gap_of = [], 1, 0
        while number <= freeze:
            self.variance.append(number)
            number, gap_of = number + 2 ** (gap_of // kappa), gap_of + 1
        self.count, self.gammas = 0, 0.0
        self.exchanges: list[int] = []

    def gradients(self, losses: Callable[[nn.Module, int], torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        found = []
        for rank, model in enumerate(self.models):
            model.zero_grad()
            losses(model, rank).backward()
            found.append({name: p.grad.clone() for name, p in self.at[rank].items()})
        return found

    @staticmethod
    def norm_of(gradients: dict[str, torch.Tensor]) -> float:
        return math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))

    def factor(self, norm: float) -> float:
        return min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0

    @torch.no_grad()
    def step(self, by_rank: list[dict[str, torch.Tensor]]) -> None:
        self.count += 1
        beta, local = 0.9, self.count - self.freeze
        mean = {name: sum(g[name] for g in by_rank) / self.ranks for name in self.v}
        clip = self.factor(self.norm_of(mean))
        if self.count in self.variance:
            self.take_mean({name: clip * gradient for name, gradient in mean.items()})
            return
        gap = 1 if local <= 0 else min(self.most, 2 ** ((local - 1) // self.double_after))
        for rank in range(self.ranks):
            for name in self.v:
                self.m[rank][name] = beta * self.m[rank][name] + (1 - beta) * clip * by_rank[rank][name]
                self.u[rank][name] = self.u[rank][name] + self.lr * self.m[rank][name]
        self.gammas += self.lr
        for name in self.anchor:
            self.anchor[name] *= 1 - self.lr * self.decay
        if local <= 0 or local % gap == 0:
            self.exchanges.append(self.count)
            self.exchange()
        for rank in range(self.ranks):
            for name, parameter in self.at[rank].items():
                most = self.most_moved() * math.sqrt(self.second())
                parameter.copy_(self.anchor[name] - (self.u[rank][name] / self.denominator(name)).clamp(-most, most))

    def take_mean(self, mean: dict[str, torch.Tensor]) -> None:
        """A step of Adam with the mean gradient; ranks are together before and after it."""
        first = 1 - 0.9**self.count if self.correct else 1.0
        for name, gradient in mean.items():
            self.v[name] = 0.999 * self.v[name] + 0.001 * gradient.square()
            momentum = 0.9 * self.m[0][name] + 0.1 * gradient
            self.anchor[name] *= 1 - self.lr * self.decay
            self.anchor[name] -= self.lr * momentum / first / self.denominator(name)
            for rank in range(self.ranks):
                self.m[rank][name] = momentum
                self.at[rank][name].copy_(self.anchor[name])

    def second(self) -> float:
        count = sum(number <= self.count for number in self.variance)
        return 1 - 0.999**count if self.correct else 1.0

    def denominator(self, name: str) -> torch.Tensor:
        return (self.v[name] / self.second()).sqrt() + self.eps

    def most_moved(self) -> float:
        """Since ranks came together."""
        return most_of_adam(0.9, 0.999) * self.gammas if self.precondition else math.inf

    @torch.no_grad()
    def exchange(self) -> None:
        for message in self.messages:
            mine = [torch.cat([self.u[rank][name].reshape(-1) for name in message.names]) for rank in range(self.ranks)]
            unit = unit_of(message, self.v, self.eps) if self.precondition else None
            parts = message.exchange(mine, unit, self.most_moved()).split(message.numels)
            for name, part in zip(message.names, parts, strict=True):
                moved = part.view_as(self.v[name])
                first = 1 - 0.9**self.count if self.correct and self.count <= self.freeze else 1.0
                self.anchor[name] -= moved / first / self.denominator(name)
                for rank in range(self.ranks):
                    self.m[rank][name] = moved / self.gammas
                    self.u[rank][name] = torch.zeros_like(moved)
        self.gammas = 0.0
