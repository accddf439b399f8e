"""Tokens on their way to their experts and back: once for every kind of layer.

Which routes there are has been decided before (``gates``, or a model's own router), and dropped routes are out. What is
left is sorted by expert; the ranks tell each other how many rows come (one small exchange), the rows travel once there
and once back, and every token adds up what its experts made of it. Nothing is padded: with E experts spread over *ep*
ranks a layer sends about ``k S M (1 - 1 / ep)`` elements each way, whatever the capacity, and ranks may have any number
of tokens, none included.

**Ranks must take part alike.** A rank whose experts get no row still has a backward with two exchanges: the graph of
what comes back hangs on an anchor, and that of no rows on the rows themselves. It also gathers its experts where they
are sharded, at the same place as the others, though it has no use for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from deepspeed.comm import within_backward
from deepspeed.comm.transport import LocalTransport, Transport


@dataclass(frozen=True)
class Plan:
    """How the routes of one forward travel.

    Attributes:
        order: ``[R]`` int64: the number, in the flattened ``[k, S]``, of each kept route, sorted by expert.
        num_choices: k.
        num_tokens: S.
        mine: Kept routes of this rank to each expert of all.
        sent: Rows that go to each rank.
        received: Rows that come from each rank.
        arrived: By rank and expert of this rank: rows that come.
        transport: Between the ranks that share the experts.
        waited: Seconds that the host waited for each exchange of rows so far, in order.
    """

    order: torch.Tensor
    num_choices: int
    num_tokens: int
    mine: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    arrived: tuple[tuple[int, ...], ...]
    transport: Transport
    waited: list[float] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether no route was dropped."""
        return len(self.order) == self.num_choices * self.num_tokens

    @property
    def num_local_experts(self) -> int:
        """Experts of this rank."""
        return len(self.arrived[0])

    @property
    def load(self) -> list[int]:
        """Rows of each expert of this rank."""
        return [sum(column) for column in zip(*self.arrived, strict=True)]


def plan_routes(indices: torch.Tensor, num_experts: int, transport: Transport | None = None) -> Plan:
    """Sorts routes by expert, and learns how many rows come. Every rank of ``transport`` must call it; it blocks.

    Args:
        indices: ``[k, S]`` integers: the expert of each route; below 0 where there is none.
        num_experts: E, of all ranks together.
        transport: Between the ranks that share them, each of which has ``E / size``, in order; None: this rank has all.
    """
    transport = transport or LocalTransport()
    choices, tokens = indices.shape
    flat = indices.reshape(-1).long()
    counts = torch.bincount(flat.clamp(min=-1) + 1, minlength=num_experts + 1)
    order = flat.argsort(stable=True)
    if transport.size == 1:
        dropped, *mine = counts.tolist() if not counts.is_meta else (0, *_evenly(flat.numel(), num_experts))
        return Plan(
            order[dropped:], choices, tokens, tuple(mine), (sum(mine),), (sum(mine),), (tuple(mine),), transport
        )
    # The counts of this rank and those that come, in one wait of the host.
    told = torch.empty_like(counts[1:])
    local = num_experts // transport.size
    rows = [local] * transport.size
    transport.all_to_all(counts[1:].contiguous(), rows, told, rows, label="how many tokens go to each expert").wait()
    if counts.is_meta:
        even = _evenly(flat.numel(), num_experts)
        first = transport.rank * local
        dropped, numbers = 0, [*even, *even[first : first + local] * transport.size]
    else:
        dropped, *numbers = torch.cat((counts, told)).tolist()
    mine, theirs = numbers[:num_experts], numbers[num_experts:]
    arrived = tuple(tuple(theirs[first : first + local]) for first in range(0, num_experts, local))
    sent = tuple(sum(mine[first : first + local]) for first in range(0, num_experts, local))
    received = tuple(map(sum, arrived))
    return Plan(order[dropped:], choices, tokens, tuple(mine), sent, received, arrived, transport)


def _evenly(routes: int, num_experts: int) -> list[int]:
    """Rows of each expert, for tensors without values: nothing is dropped, and no expert is more popular."""
    return [routes // num_experts + (expert < routes % num_experts) for expert in range(num_experts)]


Run = Callable[[torch.Tensor, Sequence[int]], torch.Tensor | Sequence[torch.Tensor]]
"""Experts: from their rows ``[n, M]``, sorted by expert, and how many each has (0 is allowed), to what they make of
these: one tensor, or one per expert."""


def dispatch(x: torch.Tensor, plan: Plan, run: Run, needed: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Sends the rows of ``x`` to their experts, and brings back what these make of them, route by route.

    Args:
        x: ``[S, M]``, the tokens of this rank.
        plan: Their routes.
        run: The experts of this rank.
        needed: Parameters that their backward needs where they have rows. Every rank asks for them before the exchanges
            of its backward: where they are sharded, all ranks then gather them in one order.

    Returns:
        ``[R, M']``: the result of each kept route, in the order of ``plan``.
    """
    rows = _Pick.apply(x, plan)
    if plan.transport.size == 1:
        return _joined(run(rows, plan.load), rows)
    rows = _Exchange.apply(rows, None, plan, False)
    results = run(_by_expert(rows, plan), plan.load)
    # Who computed nothing cannot know what the others' experts return, so the dtype on the way is settled here.
    is_cast = torch.is_autocast_enabled(x.device.type)
    on_the_way = torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype
    # Requires a gradient where anything may, so that all ranks have the same two exchanges in their backward.
    anchor = torch.empty(0, device=x.device, requires_grad=torch.is_grad_enabled())
    if torch.is_grad_enabled():
        within_backward.note(uneven=True)
    return _Exchange.apply(_by_rank(results, rows, plan).to(on_the_way), anchor, plan, True, *needed)


def combine(results: torch.Tensor, weights: torch.Tensor | None, plan: Plan) -> torch.Tensor:
    """Adds up, in fp32, what came back for each token.

    Args:
        results: ``[R, M]``, as of :func:`dispatch`.
        weights: ``[k, S]`` factor of every route; None: 1.
        plan: The routes.

    Returns:
        ``[S, M]`` in the dtype of ``results``; zeros for a token without a route.
    """
    values = results
    if weights is not None:
        values = results * weights.reshape(-1)[plan.order, None].to(torch.promote_types(results.dtype, weights.dtype))
    if plan.num_choices == 1:
        return _Put.apply(values, plan).to(results.dtype)
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    shape = (plan.num_choices, plan.num_tokens, results.shape[1])
    return _Put.apply(wide, plan).view(shape).sum(dim=0).to(results.dtype)


# -- the pieces: rows by route, by rank, by expert ---------------------------------------------------------------------


class _Pick(torch.autograd.Function):
    """The row of every kept route; its backward adds the routes of a token in their order, on every device alike."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        ctx.plan = plan
        token = plan.order if plan.num_choices == 1 else plan.order % max(plan.num_tokens, 1)
        return x.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        plan: Plan = ctx.plan
        return _laid_out(gradient, plan).view(plan.num_choices, plan.num_tokens, gradient.shape[1]).sum(dim=0), None


class _Put(torch.autograd.Function):
    """Every kept route's row at the place of the route, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, plan: Plan) -> torch.Tensor:
        ctx.plan = plan
        return _laid_out(values, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.index_select(0, ctx.plan.order), None


def _laid_out(values: torch.Tensor, plan: Plan) -> torch.Tensor:
    shape = (plan.num_choices * plan.num_tokens, *values.shape[1:])
    out = values.new_empty(shape) if plan.is_whole else values.new_zeros(shape)
    return out.index_copy_(0, plan.order, values)


class _Exchange(torch.autograd.Function):
    """Rows to other ranks; the gradient takes the way back. ``anchor`` only gives the result a graph."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, anchor: torch.Tensor | None, plan: Plan, back: bool, *needed: torch.Tensor
    ) -> torch.Tensor:
        ctx.plan, ctx.back = plan, back
        ctx.save_for_backward(*needed)
        return _travel(rows, plan, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        needed = ctx.saved_tensors  # gathers them, if they are sharded
        return _travel(gradient, ctx.plan, not ctx.back), *(None for _ in range(3 + len(needed)))


def _travel(rows: torch.Tensor, plan: Plan, back: bool) -> torch.Tensor:
    sent, received = (plan.received, plan.sent) if back else (plan.sent, plan.received)
    out = rows.new_empty(sum(received), *rows.shape[1:])
    label = "what experts made of tokens" if back else "tokens on their way to experts"
    begun = time.perf_counter()
    plan.transport.all_to_all(rows.contiguous(), sent, out, received, label=label).wait()
    plan.waited.append(time.perf_counter() - begun)
    return out


def _by_expert(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """From rows in the order of the ranks they came from to the order of experts."""
    if plan.num_local_experts == 1 or len(rows) == 0:
        return rows
    pieces = rows.split([number for of_rank in plan.arrived for number in of_rank])
    return torch.cat([piece for expert in range(plan.num_local_experts) for piece in pieces[expert :: len(plan.load)]])


def _by_rank(results: torch.Tensor | Sequence[torch.Tensor], rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """From what the experts return to one tensor in the order of the ranks that wait for it."""
    if plan.num_local_experts == 1 or len(rows) == 0:
        return _joined(results, rows)
    if isinstance(results, torch.Tensor):
        results = results.split(plan.load)
    pieces = [result.split([of_rank[expert] for of_rank in plan.arrived]) for expert, result in enumerate(results)]
    return _joined([piece[rank] for rank in range(plan.transport.size) for piece in pieces], rows)


def _joined(results: torch.Tensor | Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """The results one after the other; where there are none, of no rows, which keeps the graph."""
    if isinstance(results, torch.Tensor):
        return results
    if len(rows) == 0:
        return rows
    return results[0] if len(results) == 1 else torch.cat([result for result in results if len(result)])
