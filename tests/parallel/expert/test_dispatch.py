"""Rows in flight: their sum and gradients beside the formula, and how often they are written."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed
from deepspeed.comm.base.counters import counted
from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.transport import Transport
from deepspeed.parallel.expert.dispatch import BLOCK, decode_rows, dispatch, encode_rows, plan_routes
from tests.engine.support import rank
from tests.harness import on_ranks, on_threads, run_ranks
from tests.parallel.expert.models import batch, build
from tests.parallel.expert.test_auto import adamw, config

M, EXPERTS = 5, 4


class Rows(TorchDispatchMode):
    """Counts the rows of M elements that operations write, whatever they are for."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.split_with_sizes_copy.out:
            self.written += sum(map(len, kwargs["out"]))
        first = found[0] if isinstance(found, (tuple, list)) else found
        writes = not func.is_view and "empty" not in func.name() and "detach" not in func.name()
        if writes and isinstance(first, torch.Tensor) and first.dim() == 2 and first.shape[1] == M:
            self.written += len(first)
        return found


def _experts(rows: Sequence[torch.Tensor], first: int, counter: Rows) -> list[torch.Tensor]:
    """Expert e multiplies by e + 2; what that writes is not the dispatch's."""
    counter.written -= 2 * sum(map(len, rows))  # and as much in backward
    return [own * (first + number + 2) if len(own) else own for number, own in enumerate(rows)]


def _cell(transport: Transport | None, k: int, tokens: int, share_dropped: float, per_expert: bool) -> None:
    draws = torch.Generator().manual_seed(10 * k + tokens + rank())
    x = torch.randn(tokens, M, generator=draws, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(k, tokens, generator=draws, dtype=torch.float64).requires_grad_()
    # No two choices of a token are equal, as routers choose.
    indices = torch.rand(tokens, EXPERTS, generator=draws).argsort(dim=1)[:, :k].t().contiguous()
    indices = indices.masked_fill(torch.rand(k, tokens, generator=draws) < share_dropped, -1)
    size, place = (1, 0) if transport is None else (transport.size, transport.rank)
    plan = plan_routes(indices, EXPERTS, transport)
    first = place * EXPERTS // size
    counter = Rows()

    def run(rows: Any) -> Any:
        made = _experts(rows if per_expert else rows.split(plan.load), first, counter)
        if per_expert:
            return made
        counter.written -= 2 * sum(plan.load)  # the cat, and the split's backward
        return torch.cat(made)

    with counter:
        out = dispatch(x, weights, plan, run, module=nn.Identity(), per_expert=per_expert)
    forward, counter.written = counter.written, 0
    gradient = torch.randn(tokens, M, generator=draws, dtype=torch.float64)
    with counter:
        found = torch.autograd.grad(out, (x, weights), gradient)
    factors = torch.where(indices >= 0, weights * (indices + 2), 0.0)
    expected = factors.sum(dim=0)[:, None] * x
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (x, weights), gradient))
    arrived, own, leaving, arriving = sum(plan.load), 0, 0, 0
    if plan.rows is not None:
        own = plan.rows.sent[place]
        leaving, arriving = sum(plan.rows.sent) - own, sum(plan.rows.received) - own
        # Pairs of routes, 16 bytes, take rows of 40.
        leaving += -(-16 * (len(plan.order) - plan.routes_to[place]) // 40)
        arriving += -(-16 * (arrived - sum(plan.arrived[place])) // 40)
    # Each way: gathered for each rank, received, sorted by expert, joined; summed by row, those of others once more for
    # them to read, received, summed by token.
    each_way = own + leaving + arriving + 2 * arrived + (own + arriving) + arriving + leaving + own + tokens
    # Backward also the products with the weights and for their gradient.
    assert forward + counter.written <= 2 * each_way + 2 * arrived, (k, size, share_dropped, per_expert)


def _cells(ep_size: int) -> None:
    transport = Job.adopt().axis_of().transport("outside engines", device=torch.device("cpu")) if ep_size > 1 else None
    for k in (1, 2, 4):
        for share in (0.0, 0.4, 1.0):
            for per_expert in (True, False):
                _cell(transport, k, 9 * rank() if k == 2 else 7 + 3 * rank(), share, per_expert)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_rows_reach_their_experts_and_are_written_as_seldom_as_can_be(ep_size: int) -> None:
    run_ranks(_cells, ep_size, ep_size)


@on_threads(4, 8)
def test_a_token_goes_once_to_each_rank(transport: Transport, ranks: int) -> None:
    """Bytes of the four exchanges, top 8 of 64: at most 0.75 of a row per route over 8 ranks, 0.5 over 4."""
    tokens, choices, experts, width = 96, 8, 64, 1024
    draws = torch.Generator().manual_seed(transport.rank)
    indices = torch.rand(tokens, experts, generator=draws).argsort(dim=1)[:, :choices].t().contiguous()
    x, weights = torch.randn(tokens, width, requires_grad=True), torch.rand(choices, tokens, requires_grad=True)
    sent = []
    exchange = transport.exchange

    def counting(leaving: Any, *more: Any, **named: Any) -> Any:
        sent.append(sum(part.nbytes for rank, parts in enumerate(leaving) if rank != transport.rank for part in parts))
        return exchange(leaving, *more, **named)

    transport.exchange = counting  # type: ignore[method-assign]
    plan = plan_routes(indices, experts, transport)
    dispatch(x, weights, plan, torch.cat, module=nn.Identity()).sum().backward()
    others = indices // (experts // ranks) != transport.rank
    by_routes = int(others.sum()) * width * 4
    assert len(sent) == 4 and max(sent) <= (0.75 if ranks == 8 else 0.5) * by_routes


@on_ranks(1)
def test_sums_are_wide() -> None:
    """What a token's experts return is added up in fp32, in bf16 too."""
    x = torch.ones(1, M, dtype=torch.bfloat16)
    plan = plan_routes(torch.arange(4)[:, None], 4)
    weights = torch.tensor([[1.0], [1 / 512], [1 / 512], [1 / 512]])  # in bf16 1 + 1 / 512 would be 1
    out = dispatch(x, weights, plan, list, module=nn.Identity())
    assert out.dtype == torch.bfloat16
    assert out[0, 0].item() == torch.tensor(1 + 3 / 512).bfloat16().item() != 1.0


@pytest.mark.parametrize("width", [1, 7, BLOCK, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_a_step_of_each_block(width, dtype):
    generator = torch.Generator().manual_seed(width)
    rows = (torch.randn(5, width, generator=generator) * torch.tensor([[1e-20], [1.0], [50.0], [1e20], [0.0]])).to(
        dtype
    )
    codes = encode_rows(rows)
    assert codes.shape == (5, width + 4 * -(-width // BLOCK)) and codes.dtype is torch.uint8
    found = decode_rows(codes, width, dtype)
    assert found.dtype is dtype
    for block, near in zip(rows.float().split(BLOCK, 1), found.float().split(BLOCK, 1), strict=True):
        rounding = 2.0**-8 if dtype is torch.bfloat16 else 1e-6
        limit = block.abs().amax(1, keepdim=True) * (0.5 / 127 + rounding)
        assert ((near - block).abs() <= limit).all()
    assert len(decode_rows(encode_rows(rows[:0]), width, dtype)) == 0


def test_what_is_not_finite_is_not_finite_afterwards():
    rows = torch.ones(2, 300)
    rows[0, 5], rows[1, 299] = float("inf"), float("nan")
    found = decode_rows(encode_rows(rows), 300, torch.float32)
    assert not found[0, :BLOCK].isfinite().any() and found[0, BLOCK:].isfinite().all()
    assert not found[1, 2 * BLOCK :].isfinite().any() and found[1, : 2 * BLOCK].isfinite().all()


def _trained(dispatch: str | None, stage: int) -> tuple[list[float], int, int]:
    """Losses; bytes that all ranks asked to exchange in the last step; exchanges."""
    model = build("mixtral", hidden_size=256)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1 if parameter.dim() > 1 else 1.0)  # deviations of 0.02, as models are initialized
    settings = config(stage)
    settings["expert_parallel"]["dispatch_dtype"] = dispatch
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)[0]
    losses = []
    for step in range(8):
        with counted() as traffic:
            loss = engine(**batch(step, rank())).loss
            engine.backward(loss)
        engine.step()
        dist.all_reduce(result := loss.detach().clone())
        losses.append(result.item() / dist.get_world_size())
    engine.destroy()
    exchanged = traffic.requested_along["all_to_all", "expert"]
    dist.all_reduce(nbytes := torch.tensor(exchanged.nbytes))
    return losses, int(nbytes), exchanged.calls


@on_ranks(2)
def test_training_in_8_bits() -> None:
    for stage in (0, 3):
        exact, whole, calls = _trained(None, stage)
        coded, less, coded_calls = _trained("int8", stage)
        assert coded != exact and coded == pytest.approx(exact, rel=1e-3)
        assert coded_calls == calls
        # Two of the four ways of a row of 256 fp32 elements take 264 bytes in place of 1024; pairs are whole rows.
        assert less / whole == pytest.approx((264 + 1024) / 2048, abs=0.03)
