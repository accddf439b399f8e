"""One module with stacked experts, as models of the Transformers library have them, spread over ranks.

Such a module gets tokens, the experts that the model's own router chose, and weights; the router, shared experts and
losses are the model's and stay as they are. Only the stacked weights are cut, and
tokens are sent to the ranks that have their experts.

The weights of all experts lie stacked in one tensor, ``[E, out, in]`` or ``[E, in, out]``. On the host every expert is
a matrix product of its own: a loop over ``weight.unbind(0)``, whose backward builds each gradient once (indexing
``weight[e]`` would build a gradient of full size per expert, 30 times slower at 64 experts). On CUDA devices of compute
capability 9 and newer the products of all experts are one ``grouped_mm``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed.comm.job.groups import expert_axis
from deepspeed.engine_feature import mark
from deepspeed.give_base import give_base
from deepspeed.models.stacked_experts import (
    parts_of,
    returns_tokens,
    routes_in,
    stacked_weights,
    takes_all,
    takes_routes,
)
from deepspeed.parallel.expert.activations import activation_of
from deepspeed.parallel.expert.dispatch import RoutePlan, RoutingMetrics, dispatch, plan_routes
from deepspeed.uncompiled import uncompiled
from deepspeed.zero.address import full_shape

_STATE = "_ds_spread"


@dataclass
class Spread:
    """Describes how a module's experts are spread over ranks."""

    num_experts: int  # number of experts of all ranks together
    ep_size: int  # ranks that share them
    # the module gets every token for every expert, ``[E * S, M]``, with zeros where the router chose none
    takes_all: bool
    returns_tokens: bool = False  # a route beyond the experts gives its token back; otherwise it gives nothing
    rows: Mapping[str, int] = field(default_factory=dict)  # by name: the length of each stack on all ranks together
    grouped: bool = True  # use grouped products where they are faster
    is_coded: bool = False  # tokens are sent to experts in 8 bits
    # name of a registered activation that replaces the module's own; None: the module's own
    activation: str | None = None
    balance: RoutingMetrics | None = None  # where the routes of the last forward went; None before the first
    loads: list[int] | None = None  # by expert: routes of this rank whose backward ran; None: they are not counted

    @classmethod
    def of(cls, module: nn.Module, ep_size: int) -> Spread:
        """Returns the description of a whole module whose experts ``ep_size`` ranks will share."""
        stacks = stack_rows(module)
        experts = stacks["down_proj"]
        lengths = {name: full_shape(p)[:1] for name, p in module._parameters.items() if p is not None}
        cut = [name for name, length in lengths.items() if name in stacks or length == (experts,)]
        return cls(
            experts,
            ep_size,
            takes_all(module),
            returns_tokens=returns_tokens(module, stacks),
            rows={name: stacks.get(name, experts) for name in cut},
        )

    def intervals(self, rows: int, place: int) -> list[tuple[int, int]]:
        """Returns the rows of a stack that a rank keeps: those of its experts, and a part of those without expert.

        The stack has ``rows`` on all ranks together; the rank is number ``place`` of those that share the experts.
        """
        bounds = ((0, self.num_experts), (self.num_experts, rows))
        found = [(low, (high - low) // self.ep_size) for low, high in bounds if low < high]
        return [(low + place * each, low + (place + 1) * each) for low, each in found]

    def count(self, plan: RoutePlan, out: torch.Tensor) -> None:
        """Counts the routes of a plan when the backward of its result ``out`` ``[S, M]`` runs, once.

        So evaluations do not count, and a forward that is recomputed counts once.
        """
        if self.loads is None or not out.requires_grad:
            return
        pending = [plan.mine]

        def add(_: torch.Tensor) -> None:
            if pending and self.loads is not None:
                self.loads = [a + b for a, b in zip(self.loads, pending.pop(), strict=True)]

        out.register_hook(add)


def spread_of(module: nn.Module) -> Spread | None:
    """Returns how a module's experts are spread; None: they are not."""
    found: Spread | None = module.__dict__.get(_STATE)
    return found


def spread(module: nn.Module, state: Spread) -> None:
    """Makes ``module``, whose weights have been cut, send tokens to the ranks of their experts."""
    module.__dict__[_STATE] = state
    mark(module, "deepspeed.parallel.expert.feature")
    give_base(module, _TakesAll if state.takes_all else _TakesChosen)


def stack_rows(module: nn.Module) -> dict[str, int]:
    """Returns the lengths of a module's stacked weights, by name."""
    return {name: full_shape(weight)[0] for name, weight in stacked_weights(module).items()}


def is_stack(module: nn.Module) -> bool:
    """Returns whether a module has routed experts stacked in one tensor, regardless of what it computes with them."""
    return any(len(full_shape(weight)) == 3 for weight in stacked_weights(module).values()) and takes_routes(module)


def rows_in(stack: torch.Tensor, intervals: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Returns a copy of some intervals of a stack, one after the other."""
    return torch.cat([stack[low:high] for low, high in intervals])


class _TakesChosen(nn.Module):
    """Base class in front of stacked experts that get tokens, chosen experts and weights."""

    @uncompiled
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None, **more: Any
    ) -> torch.Tensor:
        """Returns ``[S, M]``: for each token the weighted sum of its experts' results, by ``[S, k]`` choices."""
        index, weights = routes_in(top_k_index, top_k_weights, more)
        state: Spread = self.__dict__[_STATE]
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        index, weights = index.reshape(len(x), -1), weights.reshape(len(x), -1)
        is_beyond = index >= state.num_experts
        plan = _plan(state, index.masked_fill(is_beyond, -1).t(), x)
        out = _dispatch(self, x, weights.t(), plan)
        if state.returns_tokens:
            out = out + x * (weights * is_beyond).sum(dim=1, keepdim=True)
        return out.to(hidden_states.dtype).reshape(hidden_states.shape)


class _TakesAll(nn.Module):
    """Base class in front of stacked experts that get every token for every expert."""

    @uncompiled
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the experts' results ``[E * S, M]`` for tokens that the caller has already weighted.

        Rows of zeros give zeros and no gradient, so they are not sent.
        """
        state: Spread = self.__dict__[_STATE]
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts = torch.arange(state.num_experts, device=x.device).repeat_interleave(len(x) // state.num_experts)
        index = torch.where((x.detach() != 0).any(dim=1), experts, -1)
        return _dispatch(self, x, None, _plan(state, index[None], x))


def _plan(state: Spread, indices: torch.Tensor, x: torch.Tensor) -> RoutePlan:
    transport = expert_axis(state.ep_size, x.device).transport("layers") if state.ep_size > 1 else None
    plan = replace(plan_routes(indices, state.num_experts, transport), is_coded=state.is_coded)
    state.balance = RoutingMetrics.of(plan)
    return plan


def _dispatch(module: Any, x: torch.Tensor, weights: torch.Tensor | None, plan: RoutePlan) -> torch.Tensor:
    experts, needed = _experts_of(module), list(module.parameters())
    state: Spread = module.__dict__[_STATE]
    is_grouped = state.grouped and experts.uses_grouped

    def run_grouped(rows: torch.Tensor) -> torch.Tensor:
        return experts.run_grouped(rows, plan.load_there)

    run = run_grouped if is_grouped else experts.run_each
    out = dispatch(x, weights, plan, run, needed, module=module, per_expert=not is_grouped)
    state.count(plan, out)
    return out


def _experts_of(module: Any) -> StackedExperts:
    parts = parts_of(module)
    activation = module.__dict__[_STATE].activation
    between = parts.between if activation is None else activation_of(activation, module)
    up = ExpertStack(parts.up, parts.up_bias, parts.is_transposed)
    down = ExpertStack(parts.down, parts.down_bias, parts.is_transposed)
    return StackedExperts(up, between, down, parts.after)


Rowwise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ExpertStack:
    """A product with a weight and maybe a bias per expert."""

    # ``[E, out, in]``, or ``[E, in, out]`` where ``is_transposed``; may be longer than the experts are many
    weight: torch.Tensor
    bias: torch.Tensor | None  # ``[E, out]`` or None
    is_transposed: bool  # the weight is ``[E, in, out]``

    @functools.cached_property
    def _weights(self) -> Sequence[torch.Tensor]:
        return self.weight.unbind(0)

    @functools.cached_property
    def _biases(self) -> Sequence[torch.Tensor | None]:
        return [None] * len(self.weight) if self.bias is None else list(self.bias.unbind(0))

    def of(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Returns the product of one expert with ``rows``: ``[R, in]`` to ``[R, out]``."""
        weight, bias = self._weights[expert], self._biases[expert]
        if not self.is_transposed:
            return F.linear(rows, weight, bias)
        return rows @ weight if bias is None else rows @ weight + bias

    def grouped(self, rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor | None) -> torch.Tensor:
        """Returns the products of all experts at once, with rows ``[n, in]`` sorted by expert.

        ``ends`` ``[E]`` int32 are where the rows of each expert end, ``experts`` ``[n]`` that of each row, for biases.
        """
        weight = self.weight[: len(ends)]  # the rest belongs to no expert
        weight = weight if self.is_transposed else weight.transpose(1, 2)
        product = F.grouped_mm(rows.to(weight.dtype), weight, offs=ends)
        return product if self.bias is None else product + self.bias[experts]


@dataclass(frozen=True)
class StackedExperts:
    """Experts of two products each."""

    up: ExpertStack  # the first product
    between: Rowwise  # maps the first product's result to the second's input: activation, and gate if there is one
    down: ExpertStack  # the second product
    after: Rowwise | None = None  # applied to the second product's result; None: nothing

    def run_each(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns each expert's result for its rows ``[n, M]``; experts without rows are not run.

        If no expert has rows, the first one runs on an empty tensor: the gradients are then zero, not None, so that
        weights decay and moments are updated as they would be for one whole stack.
        """
        results = []
        is_idle = not any(map(len, rows))
        for expert, own in enumerate(rows):
            if len(own) or (is_idle and expert == 0):
                result = self.down.of(expert, self.between(self.up.of(expert, own)))
                results.append(result if self.after is None else self.after(result))
            else:
                results.append(own)
        return results

    def run_grouped(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Returns the experts' results for their rows ``[n, M]``, sorted by expert.

        ``counts`` ``[E]`` int64 on their device are how many rows each expert has.
        """
        if not len(rows):
            return self.run_each([rows])[0]
        ends = counts.cumsum(0).to(torch.int32)
        has_bias = self.up.bias is not None or self.down.bias is not None
        experts = None
        if has_bias:
            experts = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
        result = self.down.grouped(self.between(self.up.grouped(rows, ends, experts)), ends, experts)
        return result if self.after is None else self.after(result)

    @property
    def uses_grouped(self) -> bool:
        """Returns whether :meth:`run_grouped` is faster, and supported."""
        return uses_grouped(self.up.weight, self.down.weight)


def uses_grouped(*weights: torch.Tensor) -> bool:
    """Returns whether ``grouped_mm`` fits and is faster: bf16, compute capability 9 and newer, rows of 16 bytes."""
    return all(
        weight.device.type == "cuda"
        and weight.dtype == torch.bfloat16
        and _capability(weight.device) >= (9, 0)
        and all(extent * weight.element_size() % 16 == 0 for extent in weight.shape[1:])
        for weight in weights
    )


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
