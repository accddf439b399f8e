"""The gate of a mixture-of-experts layer: top-1, top-2 and top-k routing from fp32 logits, and the layer itself.

Equations: Shazeer et al. 2017 (noisy top-k), GShard (Lepikhin et al. 2020: top-2, capacity, queues) and Switch
Transformer (Fedus et al. 2021: top-1, balance loss). A *route* is a token with one of its experts. Every
expert takes at most *capacity* routes; those behind in its queue are dropped. The three differ in the queue's order:

- top-1: random (``use_rts``), or by token;
- top-2: all first choices by token, then all second choices;
- top-k: by weight, the heaviest first, or by token (``drop_policy``).

Letters: S tokens of this rank, E experts, k experts per token, C capacity. Routes are ``[k, S]`` tensors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from deepspeed.axes import EXPERT
from deepspeed.comm.job.job import axis_of
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.expert.dispatch import count_each
from deepspeed.uncompiled import uncompiled

Choose = Callable[[torch.Tensor], torch.Tensor]
"""Takes the experts that a gate chose, ``[S, k]`` int64, and returns those that it uses."""

NOISE_POLICIES = (None, "None", "Jitter", "RSample")


_JITTER = 1e-2


@dataclass(frozen=True)
class Routes:
    """Holds the experts and weights that the gate chose for the tokens of this rank."""

    l_aux: torch.Tensor  # balance loss, 0-dim fp32
    capacity: int | None  # most routes that an expert takes from this rank; None where nothing is dropped
    num_experts: int  # e
    indices: torch.Tensor  # ``[k, S]`` int64: the expert of each route, -1 where it is dropped
    weights: torch.Tensor  # ``[k, S]`` fp32: the weight of each route's result, 0 where it is dropped
    counts: torch.Tensor  # ``[E]`` int64: routes that chose each expert, before any is dropped


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
        use_rts: Random token selection (k = 1): an expert over capacity drops random tokens instead of the last.
        ep_group: Accepted; the gate needs no other rank.
        top2_2nd_expert_sampling: The second of two experts is drawn with Gumbel noise; in training only.

    Raises:
        DeepSpeedConfigError: ``k`` is less than 1, or more than the experts.
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
        self.choose: Choose | None = None  # while routes are recorded or replayed
        self.gate_time = 0.0  # milliseconds of the last call, while wall_clock_breakdown

    def routes(self, x: torch.Tensor, used_token: torch.Tensor | None = None) -> Routes:
        """Returns the routes of ``x`` ``[S, M]``; ``used_token`` ``[S]`` of 0 and 1 masks tokens (k = 1)."""
        started = time.perf_counter()
        with torch.autocast(x.device.type, enabled=False):
            wide = x.float()
            if self.training and self.noisy_gate_policy == "Jitter":
                wide = jittered(wide)
            found = self._route(F.linear(wide, self.wg.weight.float()), used_token)
        if self.wall_clock_breakdown:
            self.gate_time = (time.perf_counter() - started) * 1000
        return found

    def _route(self, logits: torch.Tensor, used_token: torch.Tensor | None) -> Routes:
        capacity = None
        if self.drop_tokens:
            factor = self.capacity_factor if self.training else self.eval_capacity_factor
            capacity = capacity_of(len(logits), logits.shape[1], self.k * factor, self.min_capacity)
        if self.k == 1:
            noise = self.training and self.noisy_gate_policy == "RSample"
            return route_top1(
                logits,
                capacity,
                used_token=used_token,
                noise=noise,
                random_queue=self.use_rts,
                choose=self.choose,
            )
        if self.k == 2:
            noise = self.training and self.top2_2nd_expert_sampling
            return route_top2(logits, capacity, noise=noise, choose=self.choose)
        return route_topk(logits, self.k, capacity, choose=self.choose)

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


def capacity_of(num_tokens: int, num_experts: int, factor: float, min_capacity: int) -> int:
    """Returns the most routes that an expert takes: ``max(ceil(S / E * factor), min_capacity)``."""
    return max(math.ceil(num_tokens / num_experts * factor), int(min_capacity))


def jittered(x: torch.Tensor, epsilon: float = _JITTER) -> torch.Tensor:
    """Multiplies ``x`` (any shape) by independent factors from U(1 - epsilon, 1 + epsilon)."""
    if epsilon == 0:
        return x
    return x * torch.empty_like(x).uniform_(1.0 - epsilon, 1.0 + epsilon)


def gumbel_like(logits: torch.Tensor) -> torch.Tensor:
    """Draws from Gumbel(0, 1) independently, in the shape of ``logits``."""
    return -torch.empty_like(logits).exponential_().log()


def route_top1(
    logits: torch.Tensor,
    capacity: int | None,
    *,
    used_token: torch.Tensor | None = None,
    noise: bool = False,
    random_queue: bool = True,
    choose: Choose | None = None,
) -> Routes:
    """Routes every token to its best expert by fp32 logits ``[S, E]``, with the softmax value as weight.

    Args:
        capacity: Most routes per expert; None: nothing is dropped.
        used_token: ``[S]`` of 0 and 1: tokens with 0 go nowhere.
        noise: Choose by logits plus Gumbel noise (RSample).
        random_queue: Tokens over capacity are dropped at random; otherwise the last ones.
        choose: May replace the chosen experts ``[S, 1]``.
    """
    gates = F.softmax(logits, dim=1)
    with torch.no_grad():
        chosen = (logits + gumbel_like(logits) if noise else gates).argmax(dim=1)
        if choose is not None:
            chosen = choose(chosen[:, None])[:, 0]
        if used_token is not None:
            chosen = torch.where(used_token.to(chosen.device).reshape(-1) != 0, chosen, -1)
    counts = _counts(chosen, logits.shape[1])
    kept = chosen
    if capacity is not None:
        order = torch.randperm(len(chosen), device=chosen.device) if random_queue else None
        kept = torch.where(_queue(chosen, logits.shape[1], order) < capacity, chosen, -1)
    weights = _of_routes(gates, kept[None])
    return Routes(_balance(gates, counts, 1), capacity, logits.shape[1], kept[None], weights, counts)


def route_top2(
    logits: torch.Tensor, capacity: int | None, *, noise: bool = True, choose: Choose | None = None
) -> Routes:
    """Routes every token to its two best experts, with weights that add up to 1 over those that are kept.

    The balance loss looks at first choices only. ``logits`` and ``capacity`` are as of :func:`route_top1`, ``[S, E]``;
    with ``noise`` the second expert is chosen by logits plus Gumbel noise. ``choose`` may replace both, ``[S, 2]``.
    """
    num_experts = logits.shape[1]
    gates = F.softmax(logits, dim=1)
    with torch.no_grad():
        first = gates.argmax(dim=1)
        rest = logits + gumbel_like(logits) if noise else logits
        second = rest.scatter(1, first[:, None], -math.inf).argmax(dim=1)
        chosen = torch.stack((first, second))
        if choose is not None:
            chosen = choose(chosen.t()).t().contiguous()
    firsts = _counts(chosen[0], num_experts)
    counts = firsts + _counts(chosen[1], num_experts)
    kept = chosen
    if capacity is not None:
        # Laid flat, all first choices come before all second ones.
        kept = torch.where(_queue(chosen.view(-1), num_experts).view_as(chosen) < capacity, chosen, -1)
    weights = _normalized(_of_routes(gates, kept))
    return Routes(_balance(gates, firsts, 1), capacity, num_experts, kept, weights, counts)


def route_topk(
    logits: torch.Tensor, k: int, capacity: int | None, *, by_weight: bool = True, choose: Choose | None = None
) -> Routes:
    """Routes every token to its k best experts, with weights that add up to 1 over those that are kept.

    ``logits`` and ``capacity`` are as of :func:`route_top1`, ``[S, E]``. An expert keeps the routes with the largest
    softmax values; without ``by_weight`` the first tokens. ``choose`` may replace the chosen experts ``[S, k]``.
    """
    num_experts = logits.shape[1]
    gates = F.softmax(logits, dim=1)
    chosen = gates.detach().topk(k, dim=1).indices  # [S, k]
    if choose is not None:
        chosen = choose(chosen)
    counts = _counts(chosen.reshape(-1), num_experts)
    kept = chosen
    if capacity is not None:
        flat, order = chosen.reshape(-1), None
        if by_weight:
            order = gates.detach().gather(1, chosen).reshape(-1).argsort(descending=True, stable=True)
        kept = torch.where(_queue(flat, num_experts, order).view_as(chosen) < capacity, chosen, -1)
    indices = kept.t().contiguous()
    weights = _normalized(_of_routes(gates, indices))
    return Routes(_balance(gates, counts, k), capacity, num_experts, indices, weights, counts)


def queue_positions(indices: torch.Tensor, num_experts: int, *, by_token: bool = False) -> torch.Tensor:
    """Returns the position of each kept route in the queue of its expert: ``[k, S]`` int64, 0 where it is dropped.

    There ``indices`` are -1. With ``by_token`` queues are in the order of tokens; else all first choices come first.
    """
    flat = indices.t().reshape(-1) if by_token else indices.reshape(-1)
    found = torch.where(flat >= 0, _queue(flat, num_experts), 0)
    return found.view(indices.shape[::-1]).t().contiguous() if by_token else found.view_as(indices)


# -- the public functions ----------------------------------------------------------------------------------------------


def top1gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: torch.Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> tuple[Any, ...]:
    """Routes each token to one expert.

    Args:
        logits: ``[S, E]``.
        capacity_factor: An expert takes so many times its even share of the tokens, at least ``min_capacity``.
        used_token: ``[S]`` of 0 and 1: tokens with 0 go nowhere.
        noisy_gate_policy: ``"RSample"`` chooses by logits plus Gumbel noise; the caller leaves it out in evaluation.
        drop_tokens: False: the capacity is the largest count.
        use_rts: Random token selection: an expert over capacity drops random tokens instead of the last.
        ep_group: A process group on which the largest count is agreed; None: this rank's own.
        sparse_routes: Which form is returned.
        use_tutel: Accepted; the sparse form is what Tutel's kernels wanted.

    Returns:
        ``(l_aux, combine_weights [S, E, C] fp32, dispatch_mask [S, E, C] bool, exp_counts [E])``, or with
        ``sparse_routes`` ``(l_aux, C, E, indices [k, S] int32, locations [k, S] int32, gates [k, S] fp32, exp_counts)``
        with index -1 for a dropped route.
    """
    capacity = capacity_of(len(logits), logits.shape[1], capacity_factor, min_capacity) if drop_tokens else None
    routes = route_top1(
        logits.float(), capacity, used_token=used_token, noise=noisy_gate_policy == "RSample", random_queue=use_rts
    )
    return returned(routes, ep_group, sparse_routes)


def top2gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Routes each token to two experts, by logits ``[S, E]``; arguments as in :func:`top1gating`.

    ``capacity_factor`` counts twice. ``top2_2nd_expert_sampling`` adds Gumbel noise to the choice of the second expert;
    in evaluation the caller leaves it out.

    Returns:
        The same as :func:`top1gating`, with two routes for each token.
    """
    capacity = capacity_of(len(logits), logits.shape[1], 2 * capacity_factor, min_capacity) if drop_tokens else None
    return returned(route_top2(logits.float(), capacity, noise=top2_2nd_expert_sampling), ep_group, sparse_routes)


def topkgating(
    logits: torch.Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Routes each token to ``k`` experts, by logits ``[S, E]``; arguments as in :func:`top1gating`.

    ``capacity_factor`` counts ``k`` times. An expert keeps the heaviest routes (``drop_policy="probs"``), or the first
    tokens (``"position"``).

    Returns:
        The same as :func:`top1gating`, with ``k`` routes for each token.

    Raises:
        DeepSpeedConfigError: ``k`` is not between 1 and the number of experts, or ``drop_policy`` is unknown.
    """
    if not 1 <= k <= logits.shape[1]:
        raise DeepSpeedConfigError(
            f"topkgating(k={k}): the logits are of {logits.shape[1]} experts; choose 1 to {logits.shape[1]}"
        )
    if drop_policy not in ("probs", "position"):
        raise DeepSpeedConfigError(
            f'topkgating(drop_policy={drop_policy!r}): expected "probs" (the heaviest routes stay) or "position" (the '
            "first tokens stay)"
        )
    capacity = capacity_of(len(logits), logits.shape[1], k * capacity_factor, min_capacity) if drop_tokens else None
    routes = route_topk(logits.float(), k, capacity, by_weight=drop_policy == "probs")
    return returned(routes, ep_group, sparse_routes, by_token=True)


def returned(routes: Routes, ep_group: Any, sparse_routes: bool, *, by_token: bool = False) -> tuple[Any, ...]:
    """Returns routes as the public functions do; arguments as in :func:`top1gating` and :func:`queue_positions`."""
    locations = queue_positions(routes.indices, routes.num_experts, by_token=by_token)
    capacity = routes.capacity
    if capacity is None:
        largest = routes.counts.max().clone()
        if ep_group is not None:
            largest = _largest_over(largest, ep_group)
        capacity = int(largest)
    if sparse_routes:
        return (
            routes.l_aux,
            capacity,
            routes.num_experts,
            routes.indices.int(),
            locations.int(),
            routes.weights,
            routes.counts,
        )
    return dense(replace(routes, capacity=capacity), locations)


@uncompiled
def _largest_over(value: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the largest ``value`` of the ranks that share experts; all of them must call it."""
    return axis_of(group, EXPERT).channel(value.device).largest(value.view(1), "the capacity of experts")


def dense(routes: Routes, locations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ``(l_aux, combine_weights, dispatch_mask, exp_counts)``, with one slot per expert and place in its queue.

    ``combine_weights`` and ``dispatch_mask`` (bool) are ``[S, E, capacity]``, ``exp_counts`` is ``[E]``.
    """
    assert routes.capacity is not None
    tokens = routes.indices.shape[1]
    combine = routes.weights.new_zeros(tokens, routes.num_experts, routes.capacity)
    choice, token = (routes.indices >= 0).nonzero(as_tuple=True)
    slots = (token, routes.indices[choice, token], locations[choice, token])
    combine = combine.index_put(slots, routes.weights[choice, token])
    return routes.l_aux, combine, combine.detach().bool(), routes.counts


# -- helpers -----------------------------------------------------------------------------------------------------------


def _queue(experts: torch.Tensor, num_experts: int, order: torch.Tensor | None = None) -> torch.Tensor:
    """Returns each route's place in the queue of its expert (``[R]`` int64; -1: nowhere, where it is undefined).

    ``order`` is a permutation ``[R]``: who queues first; None: as they come.
    """
    queued = experts if order is None else experts[order]
    by_expert = queued.argsort(stable=True)
    sizes = count_each(queued + 1, num_experts + 1)
    begins = sizes.cumsum(0) - sizes
    in_line = torch.arange(len(experts), device=experts.device) - begins[queued[by_expert] + 1]
    back = by_expert if order is None else order[by_expert]
    return torch.empty_like(in_line).scatter_(0, back, in_line)


def _counts(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    return count_each(experts + 1, num_experts + 1)[1:]


def _of_routes(gates: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns the softmax value of every route ``[k, S]``, 0 where it is dropped."""
    values = gates.gather(1, indices.clamp(min=0).t()).t()
    return torch.where(indices >= 0, values, 0.0)


def _normalized(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(dim=0).clamp(min=torch.finfo(weights.dtype).eps)


def _balance(gates: torch.Tensor, counts: torch.Tensor, k: int) -> torch.Tensor:
    """Returns ``E * sum(mean gate * share of tokens) / k``; 0, with a graph, where there are no tokens."""
    tokens, num_experts = gates.shape
    share = counts.to(gates.dtype) / max(tokens, 1)
    return (gates.sum(dim=0) / max(tokens, 1) * share).sum() * num_experts / k
