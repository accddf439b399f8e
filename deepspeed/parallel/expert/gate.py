"""The gate of a mixture-of-experts layer: logits in fp32, and the routes that follow from them."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.expert.gates import (
    NOISE_POLICIES,
    Routes,
    capacity_of,
    jittered,
    returned,
    route_top1,
    route_top2,
    route_topk,
)


class TopKGate(nn.Module):
    """Scores every token against every expert and picks its k experts.

    Logits, softmax and weights are fp32 whatever the model's dtype, under autocast too.

    Args:
        model_dim: M.
        num_experts: E, of all ranks together.
        k: Experts per token, at least 1.
        capacity_factor: An expert takes ``k * capacity_factor`` times its even share of the tokens.
        eval_capacity_factor: The same in evaluation.
        min_capacity: The least that an expert takes.
        noisy_gate_policy: In training only. ``"Jitter"`` multiplies the gate's input by U(0.99, 1.01); ``"RSample"``
            (k = 1) chooses by logits plus Gumbel noise.
        drop_tokens: False: experts take whatever comes.
        use_rts: Random token selection (k = 1): whom an expert turns away is drawn, not the last tokens.
        ep_group: Accepted; the gate needs no other rank.
        top2_2nd_expert_sampling: The second of two experts is drawn with Gumbel noise; in training only.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        check_policy(noisy_gate_policy)
        if not 1 <= k <= num_experts:
            raise DeepSpeedConfigError(
                f"TopKGate(k={k}, num_experts={num_experts}): a token goes to at least 1 and at most all experts; "
                "choose k among them"
            )
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.ep_group = ep_group
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = None if noisy_gate_policy == "None" else noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling
        self.wall_clock_breakdown = False
        self.gate_time = 0.0  # milliseconds of the last call, while wall_clock_breakdown

    def routes(self, x: torch.Tensor, used_token: torch.Tensor | None = None) -> Routes:
        """The routes of ``x`` ``[S, M]``; ``used_token`` ``[S]`` of 0 and 1 masks tokens (k = 1)."""
        begun = time.perf_counter()
        with torch.autocast(x.device.type, enabled=False):
            wide = x.float()
            if self.training and self.noisy_gate_policy == "Jitter":
                wide = jittered(wide)
            found = self._route(F.linear(wide, self.wg.weight.float()), used_token)
        if self.wall_clock_breakdown:
            self.gate_time = (time.perf_counter() - begun) * 1000
        return found

    def _route(self, logits: torch.Tensor, used_token: torch.Tensor | None) -> Routes:
        capacity = None
        if self.drop_tokens:
            factor = self.capacity_factor if self.training else self.eval_capacity_factor
            capacity = capacity_of(len(logits), logits.shape[1], self.k * factor, self.min_capacity)
        if self.k == 1:
            noise = self.training and self.noisy_gate_policy == "RSample"
            return route_top1(logits, capacity, used_token=used_token, noise=noise, random_queue=self.use_rts)
        if self.k == 2:
            return route_top2(logits, capacity, noise=self.training and self.top2_2nd_expert_sampling)
        return route_topk(logits, self.k, capacity)

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - callers may name it
        used_token: torch.Tensor | None = None,
        use_tutel: bool = False,
        sparse_routes: bool = False,
    ) -> tuple[Any, ...]:
        """Routes ``input`` (``[S, M]``) to experts; returns one of the forms of ``top1gating``."""
        by_token = self.k > 2
        return returned(self.routes(input, used_token), self.ep_group, sparse_routes or use_tutel, by_token=by_token)


def check_policy(noisy_gate_policy: str | None) -> None:
    """Raises for an unknown noise policy.

    Raises:
        DeepSpeedConfigError: It is none of ``NOISE_POLICIES``.
    """
    if noisy_gate_policy not in NOISE_POLICIES:
        raise DeepSpeedConfigError(
            f"noisy_gate_policy={noisy_gate_policy!r}: expected one of {', '.join(map(repr, NOISE_POLICIES))}"
        )
