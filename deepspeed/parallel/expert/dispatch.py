"""Sends tokens to their experts and the results back, for expert layers of every kind.

The gate (``gate``, or a model's own router) has already chosen the routes and dropped those over capacity. The routes
are sorted by expert; the ranks exchange row counts (one small exchange), the rows are sent to the experts and their
results back, and the results of each token are summed. Nothing is padded: with E experts spread over *ep*
ranks a layer sends about ``k S M (1 - 1 / ep)`` elements each way, whatever the capacity, and ranks may have any number
of tokens, none included.

**Rows are copied few times.** Forward writes them four times: gathered from the tokens, sorted by expert, sorted back
by route, and summed by token with their weights in one pass (``embedding_bag``); the first two are one pass
where this rank has all experts. Backward likewise, and once for the gradient of the weights. On one host, ranks
read each other's rows in place, so only the way back copies rows of other ranks once more. Those are copied first, and
are sent while this rank's own rows are being copied.

**All ranks take part in every exchange.** A rank whose experts get no rows still runs both exchanges in backward: an
anchor tensor that requires a gradient keeps the nodes in its autograd graph. It also gathers its experts where they
are sharded, at the same point as the other ranks, although it does not need them.

**Rows may be sent in 8 bits**: an integer per element and a factor for each block of a row. One factor per 128 elements
of a token is what DeepSeek-V3 sends to experts by (`technical report <https://arxiv.org/abs/2412.19437>`_, section
3.3), where elements are fp8.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from deepspeed.comm.job import backward_comm
from deepspeed.comm.transports import packing
from deepspeed.comm.transports.differentiable import all_to_all
from deepspeed.comm.transports.packing import Tensors
from deepspeed.comm.transports.transport import LocalTransport, Transport, Work
from deepspeed.uncompiled import uncompiled


@dataclass(frozen=True)
class RoutePlan:
    """Describes how the routes of one forward are sent to the experts' ranks and back."""

    # ``[R]`` int64: the number, in the flattened ``[k, S]``, of each kept route: those to this rank's experts first,
    # behind them those to the other ranks in order, each sorted by expert
    order: torch.Tensor
    num_choices: int  # k
    num_tokens: int  # s
    mine: tuple[int, ...]  # kept routes of this rank to each expert of all
    sent: tuple[int, ...]  # rows that go to each rank; to this one 0, as its own stay
    received: tuple[int, ...]  # rows that come from each rank; from this one 0
    arrived: tuple[tuple[int, ...], ...]  # by rank and expert of this rank: rows that come
    # :attr:`load` as ``[local E]`` int64 on the device of ``order``, where no host has to send it
    load_there: torch.Tensor
    transport: Transport  # between the ranks that share the experts
    is_coded: bool = False  # rows are sent to experts in 8 bits, in forward and in backward
    # seconds that the host waited for each exchange of rows so far, in order
    waited: list[float] = field(default_factory=list)

    @property
    def num_own(self) -> int:
        """Routes of this rank to its own experts."""
        return len(self.order) - sum(self.sent)

    @property
    def load(self) -> list[int]:
        """Rows of each expert of this rank."""
        return [sum(column) for column in zip(*self.arrived, strict=True)]

    def wait(self, work: Work) -> None:
        """Waits for an exchange of rows, and notes how long."""
        started = time.perf_counter()
        work.wait()
        self.waited.append(time.perf_counter() - started)

    @functools.cached_property
    def tokens(self) -> torch.Tensor:
        """``[R]`` int64: whose row each kept route takes."""
        return self.order if self.num_choices == 1 else self.order % max(self.num_tokens, 1)

    @functools.cached_property
    def by_token(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The kept routes of each token in the order of its choices: three int64 tensors, found without a wait.

        ``[R]`` their positions in ``order``, ``[R]`` their numbers in the flattened ``[k, S]``, and ``[S]`` where the
        routes of each token begin in both.
        """
        routes, kept = self.num_choices * self.num_tokens, len(self.order)
        position = self.order.new_full((routes,), -1)
        position[self.order] = torch.arange(kept, device=position.device)
        position = position.view(self.num_choices, self.num_tokens).t().reshape(-1)
        number = torch.arange(routes, device=position.device)
        number = number.view(self.num_choices, self.num_tokens).t().reshape(-1)
        if kept == routes:
            return position, number, torch.arange(0, routes, self.num_choices, device=position.device)
        is_kept = position >= 0
        end = is_kept.cumsum(0)
        target = torch.where(is_kept, end - 1, kept)  # all that are dropped go to one position behind the others
        positions, numbers = (x.new_empty(kept + 1).scatter_(0, target, x)[:kept] for x in (position, number))
        return positions, numbers, (end - is_kept.long()).view(self.num_tokens, self.num_choices)[:, 0].contiguous()


@dataclass(frozen=True)
class RoutingMetrics:
    """Counts where the routes of one forward went."""

    counts: tuple[int, ...]  # by expert of all ranks: routes of this rank that reached it
    load: tuple[int, ...]  # by expert of this rank: rows that it saw, of all ranks
    dropped: int  # routes of this rank that reached none

    @classmethod
    def of(cls, plan: RoutePlan) -> RoutingMetrics:
        """Returns the metrics of a plan."""
        routes = plan.num_choices * plan.num_tokens
        return cls(plan.mine, tuple(plan.load), routes - sum(plan.mine))

    @property
    def imbalance(self) -> float:
        """The most loaded expert's routes over the mean; 1 is even, and so is nothing at all."""
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total if total else 1.0

    @property
    def dropped_share(self) -> float:
        """Dropped routes over all."""
        routes = self.dropped + sum(self.counts)
        return self.dropped / routes if routes else 0.0

    @property
    def shares(self) -> list[float]:
        """Each expert's share of the routes that reached one."""
        total = max(sum(self.counts), 1)
        return [count / total for count in self.counts]


def count_each(values: torch.Tensor, size: int) -> torch.Tensor:
    """Returns how often each of 0 ... ``size`` - 1 occurs in ``values`` ``[R]`` int64: ``[size]`` int64.

    ``torch.bincount`` would do the same, but on a GPU the host waits for the smallest and the largest value.
    """
    return values.new_zeros(size).scatter_add_(0, values, torch.ones_like(values))


@uncompiled
def plan_routes(indices: torch.Tensor, num_experts: int, transport: Transport | None = None) -> RoutePlan:
    """Sorts routes by expert, and learns how many rows come. Every rank of ``transport`` must call it.

    The host waits for the device once, as the sizes of what is sent must be known to it. ``indices`` are ``[k, S]``
    integers: the expert of each route; below 0 where there is none. Each rank of ``transport`` has ``E / size`` of the
    experts, in order; without a transport this rank has all.
    """
    transport = transport or LocalTransport()
    choices, tokens = indices.shape
    flat = indices.reshape(-1).long()
    counts = count_each(flat.clamp(min=-1) + 1, num_experts + 1)
    if transport.size == 1:
        order = flat.argsort(stable=True)
        dropped, *mine = counts.tolist() if not counts.is_meta else (0, *_evenly(flat.numel(), num_experts))
        return RoutePlan(
            order[dropped:], choices, tokens, tuple(mine), (0,), (0,), (tuple(mine),), counts[1:], transport
        )
    # The counts of this rank and those that come, in one wait of the host.
    incoming = torch.empty_like(counts[1:])
    local = num_experts // transport.size
    rows = [local] * transport.size
    work = transport.all_to_all(
        counts[1:].contiguous(), rows, incoming, rows, label="how many tokens go to each expert"
    )
    order = flat.argsort(stable=True)
    work.wait()
    first = transport.rank * local
    if counts.is_meta:
        even = _evenly(flat.numel(), num_experts)
        dropped, numbers = 0, [*even, *even[first : first + local] * transport.size]
    else:
        dropped, *numbers = torch.cat((counts, incoming)).tolist()
    mine, theirs = numbers[:num_experts], numbers[num_experts:]
    arrived = tuple(tuple(theirs[begin : begin + local]) for begin in range(0, num_experts, local))
    begin, own = dropped + sum(mine[:first]), sum(mine[first : first + local])
    order = torch.cat((order[begin : begin + own], order[dropped:begin], order[begin + own :]))
    sent = [sum(mine[begin : begin + local]) for begin in range(0, num_experts, local)]
    received = [sum(of_rank) for of_rank in arrived]
    sent[transport.rank] = received[transport.rank] = 0
    load = incoming.view(transport.size, local).sum(0)
    return RoutePlan(order, choices, tokens, tuple(mine), tuple(sent), tuple(received), arrived, load, transport)


def _evenly(routes: int, num_experts: int) -> list[int]:
    """Returns the rows of each expert, for tensors without values: nothing is dropped, and tokens are spread evenly."""
    return [routes // num_experts + (expert < routes % num_experts) for expert in range(num_experts)]


Run = Callable[[Any], torch.Tensor | Sequence[torch.Tensor]]
"""Experts: from their rows, as :func:`dispatch` hands them over, to what they make of these: one tensor, or one per
expert."""


@uncompiled
def dispatch(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    plan: RoutePlan,
    run: Run,
    gather_first: Sequence[torch.Tensor] = (),
    *,
    module: nn.Module,
    per_expert: bool = True,
) -> torch.Tensor:
    """Sends the rows of ``x`` to their experts, and adds up for each token, in fp32, what comes back.

    Args:
        x: ``[S, M]``, the tokens of this rank.
        weights: ``[k, S]`` factor of every route; None: 1.
        run: The experts of this rank.
        gather_first: At least one parameter of each ZeRO-3 unit of the experts. They are saved for backward, so that
            every rank gathers these units before it exchanges rows, also a rank whose experts got none; otherwise
            ranks would gather and exchange in different orders. Without stage 3: no effect.
        module: The module that calls it.
        per_expert: ``run`` gets a list of the rows ``[n, M]`` of each expert (0 are allowed); else one tensor with all
            of them, sorted by expert.

    Returns:
        ``[S, M']`` in the dtype of what the experts return; zeros for a token without a route.
    """
    exchanges = x.requires_grad and plan.transport.size > 1
    rows = all_to_all(_ToExperts(plan, per_expert), x, expected=backward_comm.note(module) if exchanges else None)
    results = run(list(rows) if per_expert else rows)
    results = (results,) if isinstance(results, torch.Tensor) else tuple(results)
    is_alone = plan.transport.size == 1
    # Requires a gradient where anything may, so that all ranks have the same two exchanges in their backward.
    anchor = torch.empty(0, device=x.device, requires_grad=torch.is_grad_enabled() and not is_alone)
    if is_alone:
        dtypes = [result.dtype for result in results if len(result)]
        dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else x.dtype
    else:  # a rank without rows cannot compute what the others' experts return
        is_cast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype
    out: torch.Tensor = _FromExperts.apply(plan, dtype, weights, anchor, module, len(results), *results, *gather_first)
    return out


# -- the two ways, forward and backward --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ToExperts:
    """Gives each expert the rows of its routes; with ``back`` adds up, for each token, the rows of its routes."""

    plan: RoutePlan
    per_expert: bool
    back: bool = False

    def run(self, *values: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if self.back:
            return _summed(_send_back(self.plan, values, values[0].dtype), None, self.plan)

        def fill(routes: slice, out: torch.Tensor) -> None:
            torch.index_select(values[0], 0, self.plan.tokens[routes], out=out)

        rows = _send_to_experts(self.plan, values[0], fill)
        return rows.split(self.plan.load) if self.per_expert else rows

    def reverse(self) -> _ToExperts:
        return replace(self, back=not self.back)


class _FromExperts(torch.autograd.Function):
    """Adds up the experts' results for each token. ``anchor`` only gives the result a graph.

    Not by ``all_to_all``: its backward multiplies gradients by weights in the buffer that is sent, and computes the
    gradient of the weights from the same rows, which saves a pass over all rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: RoutePlan,
        dtype: torch.dtype,
        weights: torch.Tensor | None,
        anchor: torch.Tensor,
        module: nn.Module,
        num_results: int,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        results, gather_first = tensors[:num_results], tensors[num_results:]
        rows = _send_back(plan, results, dtype)
        ctx.pending = backward_comm.note(module) if ctx.needs_input_grad[3] else None
        ctx.plan, ctx.dtypes, ctx.num_gathered = plan, [result.dtype for result in results], len(gather_first)
        ctx.save_for_backward(weights, rows if ctx.needs_input_grad[2] else None, *gather_first)
        return _summed(rows, weights, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        plan: RoutePlan = ctx.plan
        weights, results, *_ = ctx.saved_tensors  # gathers the units of gather_first, if they are sharded
        factors = None if weights is None else weights.reshape(-1)[plan.order, None]
        products = []

        def fill(routes: slice, out: torch.Tensor) -> None:
            torch.index_select(gradient, 0, plan.tokens[routes], out=out)
            if results is not None:
                wide = torch.promote_types(out.dtype, weights.dtype)
                products.append((routes, (out.to(wide) * results[routes]).sum(dim=1).to(weights.dtype)))
            if factors is not None:
                out.mul_(factors[routes])

        rows = _send_to_experts(plan, gradient, fill)
        ctx.pending = None  # the exchange has run
        for_weights = None
        if results is not None:
            for_weights = weights.new_zeros(weights.shape)
            for routes, product in products:
                for_weights.view(-1)[plan.order[routes]] = product
        tensors = (rows,) if len(ctx.dtypes) == 1 else rows.split(plan.load)
        back = (tensor.to(dtype) for tensor, dtype in zip(tensors, ctx.dtypes, strict=True))
        return None, None, for_weights, None, None, None, *back, *(None for _ in range(ctx.num_gathered))


# -- rows in the order of routes and of experts ------------------------------------------------------------------------


def _send_to_experts(plan: RoutePlan, x: torch.Tensor, fill: Callable[[slice, torch.Tensor], None]) -> torch.Tensor:
    """Takes rows like those of ``x``, in the order of ``plan``, to their experts; ``fill`` writes those of some routes.

    Returns the rows of this rank's experts, sorted by expert, then by the rank they came from.
    """
    width, num_own, transport = x.shape[1], plan.num_own, plan.transport
    rows = x.new_empty(sum(plan.load), width)
    if transport.size == 1:
        fill(slice(num_own), rows)
        return rows
    label = "tokens sent to experts"
    if plan.is_coded:
        return _send_to_experts_coded(plan, x, fill, rows)
    leaving = transport.staging_buffer(sum(plan.sent) * width, x, label=label).view(-1, width)
    fill(slice(num_own, None), leaving)
    targets = rows.split([counts[expert] for expert in range(len(plan.load)) for counts in plan.arrived])
    by_rank = [targets[rank :: transport.size] for rank in range(transport.size)]
    own, by_rank[transport.rank] = by_rank[transport.rank], ()  # which stay out of the exchange
    work = transport.exchange([[part] for part in leaving.split(plan.sent)], by_rank, x, label=label)
    staying = own[0] if len(own) == 1 else x.new_empty(num_own, width)
    fill(slice(num_own), staying)  # while the others are sent
    if len(own) > 1:
        packing.read(staying, own)
    plan.wait(work)
    return rows


def _send_to_experts_coded(
    plan: RoutePlan, x: torch.Tensor, fill: Callable[[slice, torch.Tensor], None], rows: torch.Tensor
) -> torch.Tensor:
    """Sends rows as :func:`_send_to_experts` does, into ``rows``, with 8 bits for an element. Own rows are exact."""
    width, num_own, transport = x.shape[1], plan.num_own, plan.transport
    exact = x.new_empty(sum(plan.sent), width)
    fill(slice(num_own, None), exact)
    leaving = encode_rows(exact)
    arriving = leaving.new_empty(sum(plan.received), leaving.shape[1])
    arrivals: list[Tensors] = [[part] for part in arriving.split(plan.received)]
    parts: list[Tensors] = [[part] for part in leaving.split(plan.sent)]
    parts[transport.rank] = arrivals[transport.rank] = ()
    work = transport.exchange(parts, arrivals, leaving, label="tokens sent to experts, in 8 bits")
    staying = x.new_empty(num_own, width)
    fill(slice(num_own), staying)  # while the others are sent
    targets = rows.split([counts[expert] for expert in range(len(plan.load)) for counts in plan.arrived])
    packing.read(staying, targets[transport.rank :: transport.size])
    plan.wait(work)
    decoded = decode_rows(arriving, width, x.dtype).split(plan.received)
    for rank, part in enumerate(decoded):
        if rank != transport.rank:
            packing.read(part, targets[rank :: transport.size])
    return rows


def _send_back(plan: RoutePlan, results: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Takes rows of this rank's experts (of each, or one tensor), sorted as they came, to the routes they belong to.

    They are sent as ``dtype``. Returns ``[R, M']`` in the order of ``plan``.
    """
    if plan.transport.size == 1:
        filled = [result.to(dtype) for result in results if len(result)] or [results[0].to(dtype)]
        return filled[0].contiguous() if len(filled) == 1 else torch.cat(filled)
    if len(results) != len(plan.load):
        results = results[0].split(plan.load)
    width = next((result.shape[1] for result in results if len(result)), results[0].shape[1])
    rows = results[0].new_empty(len(plan.order), width, dtype=dtype)
    own, *others = rows.split([plan.num_own, *plan.sent])
    of_experts = [result.split([counts[e] for counts in plan.arrived]) for e, result in enumerate(results)]
    leaving = list(zip(*of_experts, strict=True))
    arriving: list[Tensors] = [[part] for part in others]
    arriving[plan.transport.rank] = own.split(plan.arrived[plan.transport.rank])
    plan.wait(plan.transport.exchange(leaving, arriving, rows, label="outputs of experts"))
    return rows


def _summed(rows: torch.Tensor, weights: torch.Tensor | None, plan: RoutePlan) -> torch.Tensor:
    """Returns ``[S, M]``: the rows of each token times the weights of its routes, in one pass and one fixed order."""
    if not len(rows):
        return rows.new_zeros(plan.num_tokens, rows.shape[1])
    positions, numbers, begins = plan.by_token
    factors, wide = None, rows
    if weights is not None:
        wide = rows.to(torch.promote_types(rows.dtype, weights.dtype))
        factors = weights.reshape(-1)[numbers].to(wide.dtype)
    summed: torch.Tensor = torch.embedding_bag(wide, positions, begins, False, 0, False, factors)[0]
    return summed.to(rows.dtype)


BLOCK = 128
"""Elements of a row that share a factor."""


def encode_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns the codes of floating rows ``[n, width]``: uint8 ``[n, width + 4 * ceil(width / BLOCK)]``.

    An element is off by half a step at most: 1/254 of the largest one of its block. A block with an element that is not
    finite is not finite when it is decoded.
    """
    count, width = rows.shape
    blocks = F.pad(rows.float(), (0, -width % BLOCK)).view(count, -(-width // BLOCK), BLOCK)
    scales = blocks.abs().amax(dim=-1) / 127
    codes = (blocks / scales.masked_fill(scales == 0, 1).unsqueeze(-1)).round_().nan_to_num_(0.0).to(torch.int8)
    body = codes.flatten(1)[:, :width].contiguous()
    factors = scales.flatten().view(torch.uint8).view(count, 4 * scales.shape[1])
    return torch.cat((body.view(torch.uint8), factors), dim=1)


def decode_rows(codes: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the rows ``[n, width]`` of ``codes``, in ``dtype``."""
    count = len(codes)
    copied = torch.contiguous_format  # into memory of its own, as bytes are aligned for factors there
    scales = codes[:, width:].clone(memory_format=copied).view(torch.float32)
    body = F.pad(codes[:, :width].clone(memory_format=copied).view(torch.int8).float(), (0, -width % BLOCK))
    blocks = body.view(count, -(-width // BLOCK), BLOCK) * scales.unsqueeze(-1)
    return blocks.flatten(1)[:, :width].to(dtype)
