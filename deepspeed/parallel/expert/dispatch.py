"""Sends tokens to their experts and the results back, for expert layers of every kind.

The gate (``gate``, or a model's own router) has already chosen the routes and dropped those over capacity. **A token
goes once to each rank** that has some of its experts, however many of its experts are there. With its row go, for each
of these routes, the number of the row and the route's weight (16 bytes). The rank runs its experts on the rows,
multiplies the results by the weights, adds up those of a token in fp32, and sends back one row. The tokens' own ranks
add up what comes from the ranks. Backward likewise: one row of the gradient goes to each rank, and one row of the
tokens' gradient comes back, with the gradients of the weights. The ranks exchange row counts beforehand (one small
exchange). With k of E experts chosen evenly over *ep* ranks, 8 of 64 over 8 ranks send 0.68 of a row per route.
Only the numbers of routes are padded, to whole rows; ranks may have any number of tokens, none included.

**Rows are copied few times.** Each way they are gathered for each rank, sent, sorted by expert in one pass, and summed
by token in one pass (``embedding_bag``). On one host, ranks read each other's rows in place. This rank's own rows are
gathered while the others are sent.

**All ranks take part in every exchange.** A rank whose experts get no rows still runs both exchanges in backward: an
anchor tensor that requires a gradient keeps the nodes in its autograd graph. It also gathers its experts where they
are sharded, at the same point as the other ranks, although it does not need them.

**Rows may be sent in 8 bits**: an integer per element and a factor for each block of a row. One factor per 128 elements
of a token is what DeepSeek-V3 sends to experts by (`technical report <https://arxiv.org/abs/2412.19437>`_, section
3.3), where elements are fp8.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from deepspeed.comm.job import backward_comm
from deepspeed.comm.transports.differentiable import all_to_all
from deepspeed.comm.transports.packing import Tensors
from deepspeed.comm.transports.transport import LocalTransport, Transport, Work
from deepspeed.uncompiled import uncompiled


@dataclass(frozen=True)
class RoutePlan:
    """Describes how the routes of one forward are sent to the experts' ranks and back."""

    # ``[R]`` int64: the number, in the flattened ``[k, S]``, of each kept route, sorted by expert
    order: torch.Tensor
    num_choices: int  # k
    num_tokens: int  # s
    mine: tuple[int, ...]  # kept routes of this rank to each expert of all
    arrived: tuple[tuple[int, ...], ...]  # by rank and expert of this rank: routes that come
    # :attr:`load` as ``[local E]`` int64 on the device of ``order``, where no host has to send it
    load_there: torch.Tensor
    transport: Transport  # between the ranks that share the experts
    rows: SentRows | None = None  # which tokens go to which rank; None: this rank has all experts
    is_coded: bool = False  # rows are sent to experts in 8 bits, in forward and in backward
    # seconds that the host waited for each exchange of rows so far, in order
    waited: list[float] = field(default_factory=list)

    @property
    def load(self) -> list[int]:
        """Rows of each expert of this rank."""
        return [sum(column) for column in zip(*self.arrived, strict=True)]

    @property
    def routes_to(self) -> list[int]:
        """Kept routes of this rank to the experts of each rank."""
        local = len(self.mine) // self.transport.size
        return [sum(self.mine[first : first + local]) for first in range(0, len(self.mine), local)]

    def wait(self, work: Work) -> None:
        """Waits for an exchange of rows, and notes how long."""
        started = time.perf_counter()
        work.wait()
        self.waited.append(time.perf_counter() - started)

    @functools.cached_property
    def tokens(self) -> torch.Tensor:
        """``[R]`` int64: whose row each kept route takes."""
        return self.order if self.num_choices == 1 else self.order % max(self.num_tokens, 1)

    def by_choice(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values ``[R]`` in the order of :attr:`order` as ``[k, S]``: 0 for routes that are not kept."""
        found = values.new_zeros(self.num_choices * self.num_tokens)
        return found.index_copy_(0, self.order, values).view(self.num_choices, self.num_tokens)


@dataclass(frozen=True)
class SentRows:
    """Which tokens a rank sends to which rank, each once."""

    # ``[U]`` int64: the token of each row, those for rank 0 first; of one rank in the order of tokens
    tokens: torch.Tensor
    positions: torch.Tensor  # ``[R]`` int64, by route as in ``order``: its row among those for the same rank
    sent: tuple[int, ...]  # rows for each rank, this one included
    received: tuple[int, ...]  # rows from each rank, this one included


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
        dropped, *kept = counts.tolist() if not counts.is_meta else (0, *_evenly(flat.numel(), num_experts))
        return RoutePlan(order[dropped:], choices, tokens, tuple(kept), (tuple(kept),), counts[1:], transport)
    size, local = transport.size, num_experts // transport.size
    # [size, S]: whether a rank has an expert of a token; routes that are dropped fall behind the last rank
    target = torch.where(flat < 0, size, flat // local)
    hits = flat.new_zeros(size + 1, tokens)
    hits.view(-1).index_fill_(0, target * tokens + torch.arange(tokens, device=flat.device).repeat(choices), 1)
    hits = hits[:size]
    own_counts = torch.cat((counts[1:].view(size, local), hits.sum(1, keepdim=True)), 1).flatten()
    # The counts of this rank and those that come, in one wait of the host.
    incoming = torch.empty_like(own_counts)
    numbers = [local + 1] * size
    work = transport.all_to_all(own_counts, numbers, incoming, numbers, label="how many tokens go to each expert")
    order = flat.argsort(stable=True)
    ends = hits.flatten().cumsum(0)
    work.wait()
    if counts.is_meta:
        even, rows = _evenly(flat.numel(), num_experts), expected_rows(tokens, choices, num_experts, size)
        mine = [[*even[first : first + local], rows] for first in range(0, num_experts, local)]
        dropped, theirs = 0, [mine[transport.rank]] * size
    else:
        both = torch.cat((own_counts, incoming)).view(2, size, local + 1).tolist()
        mine, theirs = both
        dropped = flat.numel() - sum(sum(of_rank[:local]) for of_rank in mine)
    order = order[dropped:]
    sent, received = (tuple(of_rank[local] for of_rank in each) for each in (mine, theirs))
    arrived = tuple(tuple(of_rank[:local]) for of_rank in theirs)
    begins = F.pad(hits.sum(1).cumsum(0), (1, 0))[:-1]
    of_route = target[order]
    positions = ends[of_route * tokens + order % max(tokens, 1)] - 1 - begins[of_route]
    places = torch.where(hits.flatten() > 0, ends - 1, sum(sent))  # those of no row go to one behind the others
    whose = torch.arange(tokens, device=flat.device).repeat(size)
    of_row = flat.new_empty(sum(sent) + 1).scatter_(0, places, whose)[: sum(sent)]
    return RoutePlan(
        order,
        choices,
        tokens,
        tuple(count for of_rank in mine for count in of_rank[:local]),
        arrived,
        incoming.view(size, local + 1)[:, :local].sum(0),
        transport,
        SentRows(of_row, positions, sent, received),
    )


def expected_rows(tokens: int, choices: int, num_experts: int, size: int) -> int:
    """Returns how many of ``tokens`` have an expert on one of ``size`` ranks if they choose evenly, no expert twice."""
    others = num_experts - num_experts // size
    missed = math.comb(others, choices) / math.comb(num_experts, choices)
    return round(tokens * (1 - missed))


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
    is_alone = plan.transport.size == 1
    routes = _OwnRoutes(plan) if is_alone else _SentRoutes(plan, x)
    needs_gradient = x.requires_grad or (weights is not None and weights.requires_grad)
    expected = backward_comm.note(module) if needs_gradient and not is_alone else None
    values = (x,) if weights is None else (x, weights)
    rows, *there = all_to_all(_ToExperts(routes), *values, expected=expected)
    factors = None if weights is None else there[0] if weights.requires_grad else there[0].detach()
    results = run(list(rows.split(plan.load)) if per_expert else rows)
    results = (results,) if isinstance(results, torch.Tensor) else tuple(results)
    # Requires a gradient where anything may, so that all ranks have the same two exchanges in their backward.
    anchor = torch.empty(0, device=x.device, requires_grad=torch.is_grad_enabled() and not is_alone)
    if is_alone:
        dtypes = [result.dtype for result in results if len(result)]
        dtype = functools.reduce(torch.promote_types, dtypes) if dtypes else x.dtype
    else:  # a rank without rows cannot compute what the others' experts return
        is_cast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype
    out: torch.Tensor = _FromExperts.apply(
        routes, dtype, factors, anchor, module, len(results), *results, *gather_first
    )
    return out


# -- the two ways, forward and backward --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ToExperts:
    """Gives the experts the rows and weights of their routes; with ``back`` takes their gradients to the tokens."""

    routes: _OwnRoutes | _SentRoutes
    back: bool = False

    def run(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.routes.collect(*values) if self.back else self.routes.spread(*values)

    def reverse(self) -> _ToExperts:
        return replace(self, back=not self.back)


class _FromExperts(torch.autograd.Function):
    """Adds up the experts' results for each token. ``anchor`` only gives the result a graph.

    Not by ``all_to_all``: its backward multiplies gradients by weights in the rows that arrive, and computes the
    gradient of the weights from the same rows, which saves a pass over all rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        routes: _OwnRoutes | _SentRoutes,
        dtype: torch.dtype,
        weights: torch.Tensor | None,
        anchor: torch.Tensor,
        module: nn.Module,
        num_results: int,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        results, gather_first = tensors[:num_results], tensors[num_results:]
        filled = [result.to(dtype) for result in results if len(result)] or [results[0].to(dtype)]
        rows = filled[0].contiguous() if len(filled) == 1 else torch.cat(filled)
        ctx.pending = backward_comm.note(module) if ctx.needs_input_grad[3] else None
        ctx.routes, ctx.num_gathered = routes, len(gather_first)
        ctx.results = [(result.dtype, len(result)) for result in results]
        ctx.save_for_backward(weights, rows if ctx.needs_input_grad[2] else None, *gather_first)
        return routes.combine(rows, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weights, results, *_ = ctx.saved_tensors  # gathers the units of gather_first, if they are sharded
        (rows,) = ctx.routes.spread(gradient)
        ctx.pending = None  # the exchange has run
        for_weights = None
        if results is not None:
            wide = torch.promote_types(rows.dtype, weights.dtype)
            for_weights = (rows.to(wide) * results).sum(dim=1).to(weights.dtype)
        if weights is not None:
            rows.mul_(weights[:, None])
        parts = rows.split([length for _, length in ctx.results])
        back = (part.to(dtype) for part, (dtype, _) in zip(parts, ctx.results, strict=True))
        return None, None, for_weights, None, None, None, *back, *(None for _ in range(ctx.num_gathered))


# -- rows in the order of tokens and of experts ------------------------------------------------------------------------


class _OwnRoutes:
    """The routes of a rank that has all experts. Rows are those of :class:`_SentRoutes`."""

    def __init__(self, plan: RoutePlan) -> None:
        self._plan = plan
        choice = plan.order // max(plan.num_tokens, 1)
        by_token = (plan.tokens * plan.num_choices + choice).argsort()
        self._by_token = by_token, _begins(plan.tokens, plan.num_tokens)

    def spread(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns as :meth:`_SentRoutes.spread` does."""
        rows = x.index_select(0, self._plan.tokens)
        return (rows,) if weights is None else (rows, weights.reshape(-1)[self._plan.order])

    def collect(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns as :meth:`_SentRoutes.collect` does."""
        sums = _summed(rows, None, *self._by_token)
        return (sums,) if weights is None else (sums, self._plan.by_choice(weights))

    def combine(self, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Returns as :meth:`_SentRoutes.combine` does."""
        return _summed(rows, weights, *self._by_token)


_PAIR = 16
"""Bytes that are sent for each route: the number of its row and its weight, of 8 bytes each."""


class _SentRoutes:
    """Routes to the experts of several ranks: each token goes once to each rank. Every rank calls the same methods.

    In all four exchanges rows lie in memory in the same way: those of own tokens for own experts, then for each other
    rank its rows and as many more as the pairs of its routes take.
    """

    def __init__(self, plan: RoutePlan, x: torch.Tensor) -> None:
        assert plan.rows is not None
        self._plan = plan
        width, me = x.shape[1], plan.transport.rank
        row_bytes = width + 4 * -(-width // BLOCK) if plan.is_coded else width * x.element_size()
        self._own = plan.rows.sent[me]
        self._leaving = _Sections.of(plan.rows.sent, plan.routes_to, me, row_bytes)
        self._arriving = _Sections.of(plan.rows.received, [sum(counts) for counts in plan.arrived], me, row_bytes)
        numbers = torch.arange(len(plan.rows.tokens), device=x.device)
        moved = [
            begin - before
            for begin, before in zip(self._leaving.begins, accumulate(plan.rows.sent, initial=0), strict=False)
        ]
        _add_by_rank(numbers, plan.rows.sent, moved)
        self._tokens = numbers.new_zeros(self._leaving.end).index_copy_(0, numbers, plan.rows.tokens)  # of each row
        by_token = numbers[plan.rows.tokens.argsort(stable=True)]
        self._by_token = by_token, _begins(plan.rows.tokens, plan.num_tokens)
        self._row_of_route: torch.Tensor | None = None  # of this rank's experts; known once pairs have arrived
        self._by_row = self._by_token

    def spread(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns the rows ``[n, M]`` of this rank's experts, sorted by expert, then by the rank they came from.

        ``x`` is ``[S, M]``. With ``weights`` ``[k, S]``, those of the rows ``[n]`` too.
        """
        plan, own, width = self._plan, self._own, x.shape[1]
        is_first, label = self._row_of_route is None, "tokens sent to experts"
        held = x.new_empty(self._arriving.end, width)
        if plan.is_coded:
            leaving = encode_rows(x[self._tokens[own:]])
            arriving = leaving.new_empty(len(held) - own, leaving.shape[1])
        else:
            count = self._leaving.end - own
            leaving = plan.transport.staging_buffer(count * width, x, label=label).view(count, width)
            torch.index_select(x, 0, self._tokens[own:], out=leaving)
            arriving = held[own:]
        pairs = self._pairs(weights) if is_first else []
        self._leaving.write_pairs(leaving, pairs)
        parts = self._leaving.parts(leaving), self._arriving.parts(arriving)
        work = plan.transport.exchange(*parts, leaving, label=label)
        torch.index_select(x, 0, self._tokens[:own], out=held[:own])  # while the others are sent
        plan.wait(work)
        found = self._learn_rows(self._arriving.read_pairs(arriving, pairs)) if is_first else None
        if plan.is_coded:
            held[own:] = decode_rows(arriving, width, x.dtype)
        assert self._row_of_route is not None
        rows = held.index_select(0, self._row_of_route)
        return (rows,) if weights is None or found is None else (rows, found.to(weights.dtype))

    def _pairs(self, weights: torch.Tensor | None) -> list[torch.Tensor]:
        """Returns by rank the pairs ``[n, 2]`` int64 of the routes to its experts."""
        assert self._plan.rows is not None
        positions = self._plan.rows.positions
        if weights is None:
            values = torch.zeros_like(positions)
        else:
            values = weights.detach().reshape(-1)[self._plan.order].double().view(torch.int64)
        return list(torch.stack((positions, values), 1).split(self._plan.routes_to))

    def _learn_rows(self, pairs: list[torch.Tensor]) -> torch.Tensor:
        """Takes the pairs that have arrived from each rank; returns the weights in the order of experts, float64."""
        arrived = self._plan.arrived
        lengths = [sum(counts) for counts in arrived]
        both = torch.cat(pairs)
        _add_by_rank(both[:, 0], lengths, self._arriving.begins)
        by_rank = [part.split(counts) for part, counts in zip(both.split(lengths), arrived, strict=True)]
        both = torch.cat([part for of_expert in zip(*by_rank, strict=True) for part in of_expert])
        self._row_of_route = both[:, 0].contiguous()
        self._by_row = self._row_of_route.argsort(stable=True), _begins(self._row_of_route, self._arriving.end)
        return both[:, 1].contiguous().view(torch.float64)

    def collect(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns the sums of each token's ``rows``: ``[S, M]``; the reverse of :meth:`spread`.

        With ``weights`` ``[n]``, them too, as ``[k, S]``: 0 for routes that were dropped.
        """
        sums = _summed(rows, None, *self._by_row)
        pairs: list[torch.Tensor] = []
        if weights is not None:
            arrived = self._plan.arrived
            values = torch.stack((weights.double().view(torch.int64),) * 2, 1)
            by_expert = values.split([counts[expert] for expert in range(len(arrived[0])) for counts in arrived])
            pairs = [torch.cat(by_expert[rank :: len(arrived)]) for rank in range(len(arrived))]
        returned, pairs = self._return(sums, pairs)
        tokens = _summed(returned, None, *self._by_token)
        if weights is None:
            return (tokens,)
        found = torch.cat(pairs)[:, 1].contiguous().view(torch.float64)
        return tokens, self._plan.by_choice(found.to(weights.dtype))

    def combine(self, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Returns the sums of each token's ``rows`` times ``weights`` ``[n]`` (None: 1): ``[S, M]``.

        Both sums, on the experts' rank and on the token's, are made in fp32.
        """
        returned, _ = self._return(_summed(rows, weights, *self._by_row), [])
        wide = returned if weights is None else returned.to(torch.promote_types(rows.dtype, weights.dtype))
        return _summed(wide, None, *self._by_token).to(rows.dtype)

    def _return(self, sums: torch.Tensor, pairs: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Sends rows ``[rows, M]``, and pairs if there are any, to the ranks of their tokens; returns what comes."""
        returned = sums.new_empty(self._leaving.end, sums.shape[1])
        self._arriving.write_pairs(sums[self._own :], pairs)
        parts = self._arriving.parts(sums[self._own :]), self._leaving.parts(returned[self._own :])
        work = self._plan.transport.exchange(*parts, sums, label="outputs of experts")
        returned[: self._own] = sums[: self._own]
        self._plan.wait(work)
        return returned, self._leaving.read_pairs(returned[self._own :], pairs) if pairs else []


@dataclass(frozen=True)
class _Sections:
    """Where the rows for each other rank, or from it, lie, behind the own ones; and behind them those of pairs."""

    rank: int  # this rank, whose own rows lie before all others
    rows: tuple[int, ...]  # by rank
    more: tuple[int, ...]  # by rank: rows whose memory holds the pairs
    routes: tuple[int, ...]  # by rank: number of pairs

    @classmethod
    def of(cls, rows: Sequence[int], routes: Sequence[int], rank: int, row_bytes: int) -> _Sections:
        more = [0 if other == rank else -(-_PAIR * count // max(row_bytes, 1)) for other, count in enumerate(routes)]
        return cls(rank, tuple(rows), tuple(more), tuple(routes))

    @functools.cached_property
    def begins(self) -> list[int]:
        """Number of the first row of each rank."""
        ends = accumulate(self._lengths, initial=self.rows[self.rank])
        return [0 if rank == self.rank else begin for rank, begin in zip(range(len(self.rows)), ends, strict=False)]

    @functools.cached_property
    def _lengths(self) -> list[int]:
        both = zip(self.rows, self.more, strict=True)
        return [0 if rank == self.rank else rows + more for rank, (rows, more) in enumerate(both)]

    @property
    def end(self) -> int:
        """Number of all rows."""
        return self.rows[self.rank] + sum(self._lengths)

    def parts(self, others: torch.Tensor) -> list[Tensors]:
        """Returns by rank its part of the rows of other ranks: none for this one."""
        found = others.split(self._lengths)
        return [() if rank == self.rank else (part,) for rank, part in enumerate(found)]

    def _of_pairs(self, others: torch.Tensor) -> list[torch.Tensor]:
        """Returns by rank the memory of its pairs, 1-D: empty for this one."""
        elements = _PAIR // others.element_size()
        found = zip(others.split(self._lengths), self.rows, self.routes, strict=True)
        return [part[rows:].reshape(-1)[: elements * count] for part, rows, count in found]

    def write_pairs(self, others: torch.Tensor, pairs: Sequence[torch.Tensor]) -> None:
        """Writes the pairs ``[n, 2]`` int64 for each other rank behind its rows."""
        places = self._of_pairs(others) if pairs else []
        filled = [(place, pair) for place, pair in zip(places, pairs, strict=True) if len(place)]
        if filled:
            targets, sources = zip(*filled, strict=True)
            torch._foreach_copy_(list(targets), [source.view(others.dtype).flatten() for source in sources])

    def read_pairs(self, others: torch.Tensor, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the pairs from each rank; from this one those of ``own``, which has them by rank."""
        places = self._of_pairs(others)
        found = torch.cat(places).view(torch.int64).view(-1, 2)
        counts = [0 if rank == self.rank else count for rank, count in enumerate(self.routes)]
        return [own[rank] if rank == self.rank else part for rank, part in enumerate(found.split(counts))]


def _add_by_rank(numbers: torch.Tensor, lengths: Sequence[int], added: Sequence[int]) -> None:
    """Adds numbers by rank, in place, to ``numbers`` (1-D), ``lengths`` of which belong to each rank in order."""
    parts = zip(numbers.split(list(lengths)), added, strict=True)
    filled = [(part, number) for part, number in parts if len(part)]
    if filled:
        shifted, added = zip(*filled, strict=True)
        torch._foreach_add_(list(shifted), list(added))


def _begins(values: torch.Tensor, size: int) -> torch.Tensor:
    """Returns how many of ``values`` (int64) are below 0, 1, ... ``size`` - 1: ``[size]`` int64."""
    counts = count_each(values, size)
    return counts.cumsum(0) - counts


def _summed(
    rows: torch.Tensor, weights: torch.Tensor | None, positions: torch.Tensor, begins: torch.Tensor
) -> torch.Tensor:
    """Returns sums of ``rows`` times ``weights`` in one pass and one fixed order: ``[len(begins), M]``.

    Sum *i* is that of the rows ``positions[begins[i] : begins[i + 1]]``.
    """
    if not len(rows):
        return rows.new_zeros(len(begins), rows.shape[1])
    factors, wide = None, rows
    if weights is not None:
        wide = rows.to(torch.promote_types(rows.dtype, weights.dtype))
        factors = weights[positions].to(wide.dtype)
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
