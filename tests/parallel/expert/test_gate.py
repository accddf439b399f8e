"""Gates against their published definition, written out slowly, route for route."""

import math
from collections.abc import Iterator

import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import TopKGate, top1gating, top2gating, topkgating

SHAPES = [(0, 3), (1, 1), (1, 4), (5, 2), (7, 4), (16, 8), (33, 5)]
FACTORS = [(0.25, 1), (1.0, 1), (1.0, 4), (2.0, 0), (9.0, 2)]


def cases() -> Iterator[tuple[torch.Tensor, float, int, bool]]:
    for seed, (tokens, experts) in enumerate(SHAPES):
        logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
        for factor, least in FACTORS:
            for drop in (True, False):
                yield logits, factor, least, drop


def capacity(logits: torch.Tensor, factor: float, least: int) -> int:
    return max(math.ceil(logits.shape[0] / logits.shape[1] * factor), least)


def slow_routes(logits: torch.Tensor, k: int, limit: float, queue: str) -> tuple[list[dict[int, float]], list[int]]:
    """For every token its kept experts with their weights; and how many chose each expert.

    Args:
        logits: ``[S, E]``.
        k: Experts per token.
        limit: Capacity.
        queue: ``"tokens"``, ``"choices"`` (all first choices before all second) or ``"weights"``.
    """
    gates = [[math.exp(v - max(row)) for v in row] for row in logits.double().tolist()]
    gates = [[v / sum(row) for v in row] for row in gates]
    chosen = [sorted(range(len(row)), key=lambda e: -row[e])[:k] for row in gates]  # noqa: B023
    counts = [sum(expert in row for row in chosen) for expert in range(logits.shape[1])]
    routes = [(token, rank, expert) for token, row in enumerate(chosen) for rank, expert in enumerate(row)]
    if queue == "choices":
        routes.sort(key=lambda route: route[1])
    if queue == "weights":
        routes.sort(key=lambda route: -gates[route[0]][route[2]])
    taken = [0] * logits.shape[1]
    kept: list[dict[int, float]] = [{} for _ in chosen]
    for token, _, expert in routes:
        if taken[expert] < limit:
            taken[expert] += 1
            kept[token][expert] = gates[token][expert]
    if k > 1:
        for row in kept:
            total = sum(row.values())
            for expert in row:
                row[expert] /= total
    return kept, counts


def slow_balance(logits: torch.Tensor, counts: list[int], k: int) -> float:
    tokens, experts = logits.shape
    means = torch.softmax(logits.double(), dim=1).sum(dim=0).tolist()
    return sum(m / tokens * c / tokens for m, c in zip(means, counts, strict=True)) * experts / k if tokens else 0.0


def check(found: tuple, sparse: tuple, kept: list[dict[int, float]], counts: list[int], limit: float) -> None:
    """Both forms against the slow one: routes, weights, slots."""
    _, combine, mask, exp_counts = found
    assert exp_counts.tolist() == counts and exp_counts.dtype == torch.int64
    assert combine.dtype == torch.float32 and mask.dtype == torch.bool and torch.equal(mask, combine > 0)
    assert (mask.sum(dim=0) <= 1).all(), "two in one slot"
    by_expert = combine.sum(dim=2)
    for token, row in enumerate(kept):
        assert by_expert[token].nonzero().flatten().tolist() == sorted(row)
        for expert, weight in row.items():
            assert by_expert[token, expert].item() == pytest.approx(weight, rel=1e-5)
    _, size, experts, indices, locations, gates, same = sparse
    assert (size, experts) == combine.shape[:0:-1] and torch.equal(same, exp_counts)
    rebuilt = torch.zeros_like(combine)
    for choice, token in (indices >= 0).nonzero().tolist():
        rebuilt[token, indices[choice, token], locations[choice, token]] = gates[choice, token]
    assert torch.equal(rebuilt, combine.detach())
    assert (gates[indices < 0] == 0).all() and indices.dtype == locations.dtype == torch.int32
    assert limit == math.inf or size == limit


@pytest.mark.parametrize("used", [False, True])
def test_top1(used: bool) -> None:
    for logits, factor, least, drop in cases():
        before = logits.clone()
        limit = capacity(logits, factor, least) if drop else math.inf
        mask = (torch.arange(len(logits)) % 3 != 1).long() if used else None
        options = {"used_token": mask, "drop_tokens": drop, "use_rts": False}
        found = top1gating(logits, factor, least, **options)
        sparse = top1gating(logits, factor, least, **options, sparse_routes=True)
        shown = logits if mask is None else logits[mask.bool()]
        kept, counts = slow_routes(shown, 1, limit, "tokens")
        if mask is not None:
            rows = iter(kept)
            kept = [next(rows) if here else {} for here in mask.tolist()]
        check(found, sparse, kept, counts, limit)
        assert found[0].item() == pytest.approx(slow_balance(logits, counts, 1), rel=1e-5)
        assert torch.equal(before, logits)


def test_top2() -> None:
    for logits, factor, least, drop in cases():
        if logits.shape[1] == 1:
            continue
        before = logits.clone()
        limit = capacity(logits, 2 * factor, least) if drop else math.inf
        found = top2gating(logits, factor, least, drop, None, False)
        sparse = top2gating(logits, factor, least, drop, None, False, sparse_routes=True)
        kept, counts = slow_routes(logits, 2, limit, "choices")
        check(found, sparse, kept, counts, limit)
        firsts = slow_routes(logits, 1, math.inf, "tokens")[1]
        assert found[0].item() == pytest.approx(slow_balance(logits, firsts, 1), rel=1e-5)
        assert torch.equal(before, logits)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_topk(policy: str) -> None:
    for logits, factor, least, drop in cases():
        for k in range(1, min(logits.shape[1], 4) + 1):
            limit = capacity(logits, k * factor, least) if drop else math.inf
            found = topkgating(logits, k, factor, least, drop, None, policy)
            sparse = topkgating(logits, k, factor, least, drop, None, policy, sparse_routes=True)
            kept, counts = slow_routes(logits, k, limit, "weights" if policy == "probs" else "tokens")
            if k == 1:  # over their own sum, which is all there is
                kept = [dict.fromkeys(row, 1.0) for row in kept]
            check(found, sparse, kept, counts, limit)
            assert found[0].item() == pytest.approx(slow_balance(logits, counts, k), rel=1e-5)


def test_random_token_selection_keeps_any_of_those_who_are_too_many() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[5.0, 0.0]]).repeat(6, 1)
    seen = torch.zeros(6)
    for _ in range(300):
        mask = top1gating(logits, 1.0, 1)[2]
        assert mask.sum() == 3
        seen += mask.sum(dim=(1, 2))
    assert (seen > 100).all() and (seen < 200).all()


def test_noise_is_gumbel_and_only_in_training() -> None:
    torch.manual_seed(0)
    gate = TopKGate(4, 3, k=1, noisy_gate_policy="RSample", drop_tokens=False)
    x = torch.randn(1, 4).repeat(4000, 1)
    share = torch.softmax(gate.wg(x[:1]), dim=1)[0]
    torch.testing.assert_close(gate.routes(x).counts / 4000, share, atol=0.03, rtol=0)  # the Gumbel-max trick
    gate.eval()
    assert gate.routes(x).counts.max() == 4000
    second = TopKGate(4, 3, k=2, drop_tokens=False)
    assert (second.routes(x).counts > 0).all()
    second.eval()
    assert sorted(second.routes(x).counts.tolist()) == [0, 4000, 4000]
    jitter = TopKGate(4, 3, noisy_gate_policy="Jitter", use_rts=False)
    assert jitter.routes(x[:2]).weights.unique().numel() == 2
    jitter.eval()
    assert jitter.routes(x[:2]).weights.unique().numel() == 1


def test_unsupported_settings_are_refused_in_a_sentence() -> None:
    expert = torch.nn.Linear(4, 4)
    for call, words in (
        (lambda: MoE(4, expert, num_experts=[2, 4]), "expected one number; for a pyramid give each layer its own"),
        (lambda: MoE(4, expert, num_experts=3, ep_size=2), "choose ep_size among the divisors of num_experts"),
        (lambda: MoE(4, expert, num_experts=2, noisy_gate_policy="loud"), "'loud': expected one of None, 'None'"),
        (lambda: MoE(4, expert, num_experts=2, k=3), "at least 1 and at most all experts"),
        (lambda: topkgating(torch.zeros(2, 2), 1, 1.0, 1, drop_policy="age"), "'age'"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=words):
            call()
