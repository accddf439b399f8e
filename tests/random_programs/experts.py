"""A layer of experts in plain torch, with the parameter names of ``deepspeed.moe.layer.MoE``."""

import copy
import math

import torch
from torch import nn


class _Gate(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.wg = nn.Linear(width, experts, bias=False)


class _Experts(nn.Module):
    def __init__(self, expert: nn.Module, experts: int) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(experts))


class _Layer(nn.Module):
    def __init__(self, width: int, expert: nn.Module, experts: int) -> None:
        super().__init__()
        self.gate = _Gate(width, experts)
        self.experts = _Experts(expert, experts)


def margin_of(scores: torch.Tensor, k: int) -> float:
    """Returns the smallest distance between the k-th and the next score of a row."""
    ordered = scores.detach().sort(dim=1, descending=True).values
    return (ordered[:, k - 1] - ordered[:, k]).min().item()


class PlainMoE(nn.Module):
    """Sends every token to its ``k`` best experts and drops none. Balance loss of GShard, over first choices only."""

    def __init__(self, width: int, expert: nn.Module, experts: int, k: int) -> None:
        super().__init__()
        self.deepspeed_moe = _Layer(width, expert, experts)
        self.k = k
        self.margin = math.inf  # least lead of a chosen expert over the next one, of all tokens so far

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        layer = self.deepspeed_moe
        rows = x.reshape(-1, x.shape[-1])
        logits = rows.float() @ layer.gate.wg.weight.float().T
        scores = logits.softmax(dim=1)
        best = scores.topk(self.k, dim=1).indices
        self.margin = min(self.margin, margin_of(scores, self.k))
        weights = scores.gather(1, best)
        if self.k > 1:
            weights = weights / weights.sum(dim=1, keepdim=True)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(layer.experts.deepspeed_experts):
            chosen = best == number
            at = chosen.any(dim=1).nonzero().flatten()
            if len(at):
                weight = (weights * chosen).sum(dim=1)[at].unsqueeze(1).to(rows.dtype)
                out = out.index_add(0, at, expert(rows[at]) * weight)
        share = torch.nn.functional.one_hot(best[:, 0], scores.shape[1]).float().mean(dim=0)
        balance = (scores.mean(dim=0) * share).sum() * scores.shape[1]
        return out.reshape(x.shape), balance, None
