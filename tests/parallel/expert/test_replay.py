"""Recorded routes used again equal the run that was recorded; other routes equal routers that are given them."""

import functools
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deepspeed
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.parallel.expert.replay import RouterReplay
from tests.engine.support import WIDTH, engine_of, rank
from tests.harness import on_first_rank, on_ranks
from tests.parallel.expert.every_family import build as build_family
from tests.parallel.expert.every_family import families
from tests.parallel.expert.models import batch, build
from tests.parallel.expert.test_auto import adamw, config
from tests.parallel.expert.test_layer import CHECKPOINTS, Net, distinguished

STEPS, EXPERTS = 3, 4
FEW = ("longcat_flash", "llama4_text", "zaya", "gpt_oss")  # experts that give tokens back, that get all; skips; logits
UNLIKE = {
    "deepseek_v4": "expected the router of .* to choose among 4 experts by torch.topk",
    "phimoe": "expected the router of .* to choose among 4 experts by torch.topk",
    "ernie4_5_vl_moe_text": "expected a forward inside the context that runs each layer with experts",
}
"""Families whose routers look experts up or draw them, or that have layers for other tokens than text."""


def _routes(step: int, of_rank: int, layers: int = 2) -> torch.Tensor:
    """Two experts of four for each token, drawn."""
    draws = torch.Generator().manual_seed(10 * step + of_rank)
    tokens = batch(step, of_rank)["input_ids"].numel()
    return torch.rand(tokens, layers, EXPERTS, generator=draws).argsort(-1)[..., :2]


def _results(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns a model's output and its gradients."""
    model.zero_grad()
    torch.manual_seed(0)
    out = model(**inputs)[0].float()
    (out * torch.linspace(-3, 3, out.numel()).cos().view_as(out)).mean().backward()
    return out.detach(), {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def _replays(name: str, model: Any) -> None:
    router, inputs = RouterReplay(model), {"input_ids": batch(0, 1)["input_ids"]}
    if name != "diffusion_gemma_text":  # has no recomputation
        model.gradient_checkpointing_enable()
    model.train()
    with router.record() as record:
        found, gradients = _results(model, inputs)
    with router.replay(record.routes.int()):
        again, same = _results(model, inputs)
    assert torch.equal(again, found)
    assert all(torch.equal(same[name], value) for name, value in gradients.items())
    with router.replay((record.routes + 1) % EXPERTS), router.record() as other:
        changed, _ = _results(model, inputs)
    assert torch.equal(other.routes, (record.routes + 1) % EXPERTS)
    assert not torch.equal(changed, found)
    again, _ = _results(model, inputs)
    assert torch.equal(again, found), "hooks are left behind"


@pytest.mark.parametrize("kind", FEW)
def test_a_few_families(kind: str) -> None:
    _replays(kind, build_family(families([kind])[kind]))


@pytest.mark.slow
def test_every_family() -> None:
    for name, kind in families().items():
        refused = pytest.raises((DeepSpeedConfigError, CallOrderError), match=UNLIKE.get(name))
        with refused if name in UNLIKE else nullcontext():
            _replays(name, build_family(kind))


class _GivenGate(nn.Module):
    """Mixtral's router, written again with its experts as an argument."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.weight, self.index = gate.weight, torch.empty(0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight)
        weights = logits.float().softmax(-1).gather(-1, self.index)
        return logits, weights / weights.sum(-1, keepdim=True), self.index


@on_first_rank
def _reference(world: int) -> list[list[float]]:
    model = build("mixtral", output_router_logits=False)
    optimizer, found = adamw(model), []
    blocks = [layer.mlp for layer in model.model.layers]
    for block in blocks:
        block.gate = _GivenGate(block.gate)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for other in range(world):
            for block, index in zip(blocks, _routes(step, other).unbind(1), strict=True):
                block.gate.index = index
            losses.append(model(**batch(step, other)).loss)
        (sum(losses) / world).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append([loss.item() for loss in losses])
    return found


@on_ranks(2)
@pytest.mark.parametrize(("ep_size", "stage"), [(1, 2), (2, 3)])
def test_engines_use_given_routes(ep_size: int, stage: int) -> None:
    expected = _reference(2)
    model = build("mixtral", output_router_logits=False)
    model.gradient_checkpointing_enable()
    settings = config(stage, ep_size, **({} if ep_size > 1 else {"expert_parallel": {"enabled": False}}))
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)[0]
    engine.train()
    for step, row in enumerate(expected):
        with engine.router.replay(_routes(step, rank())), engine.router.record() as record:
            loss = engine(**batch(step, rank())).loss
            engine.backward(loss)
        assert torch.equal(record.routes, _routes(step, rank()))
        assert loss.item() == pytest.approx(row[rank()], abs=1e-5), f"step {step}"
        engine.step()
    engine.destroy()


@on_ranks(2)
def test_ranks_that_share_a_sequence_replay_their_part() -> None:
    model = build("qwen3_moe", output_router_logits=False)
    model.set_attn_implementation("sdpa")
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=config(1, 2, sequence_parallel_size=2))[0]
    ids = torch.randint(3, 50, (1, 8), generator=torch.Generator().manual_seed(0))
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])  # two packed documents
    part = {"input_ids": ids.chunk(2, 1)[rank()], "position_ids": places.chunk(2, 1)[rank()]}
    with engine.router.record() as record:
        found = engine(**part).logits
    assert record.routes.shape == (4, 2, 2)
    with engine.router.replay(record.routes):
        assert torch.equal(engine(**part).logits, found)
    with engine.router.replay(other := (record.routes + 1) % EXPERTS), engine.router.record() as again:
        assert not torch.equal(engine(**part).logits, found)
    assert torch.equal(again.routes, other)
    engine.destroy()


@on_ranks(2)
@pytest.mark.parametrize(("k", "size", "checkpoint"), [(1, 2, "reentrant"), (2, 1, "not reentrant"), (3, 2, None)])
def test_expert_layers(k: int, size: int, checkpoint: str | None) -> None:
    model = Net((size, size), CHECKPOINTS.get(checkpoint), k=k, drop_tokens=False)
    distinguished(model)
    engine = engine_of(model, 1)
    x = torch.randn(5 + rank(), WIDTH)

    def run() -> tuple[float, torch.Tensor]:
        loss = engine(x)
        engine.backward(loss)
        gradient = deepspeed.utils.safe_get_full_grad(model.blocks[0].deepspeed_moe.gate.wg.weight).clone()
        engine.zero_grad()
        return loss.item(), gradient

    with engine.router.record() as record:
        loss, gradient = run()
    assert record.routes.shape == (len(x), 2, k)
    with engine.router.replay(record.routes):
        again, same = run()
    assert again == loss
    assert torch.equal(same, gradient)
    given = torch.zeros(len(x), 2, k, dtype=torch.long) + torch.arange(k)
    with engine.router.replay(given):
        run()
    for block in model.blocks:
        assert block.deepspeed_moe.exp_counts.tolist() == [len(x)] * k + [0] * (EXPERTS - k)
    engine.destroy()


def test_groups_of_experts_do_not_bound_given_ones() -> None:
    model = build("deepseek_v2", topk_method="group_limited_greedy", num_hidden_layers=2)
    router, given = RouterReplay(model), torch.tensor([0, 2]).expand(10, 1, 2)  # of two groups, where one is chosen
    gate = model.model.layers[1].mlp.gate
    seen: list[Any] = []
    gate.register_forward_hook(lambda *call: seen.append(call[2]))
    with router.replay(given):
        _results(model, {"input_ids": batch(0, 0)["input_ids"]})
    logits, weights, index = seen[0]
    assert torch.equal(index, given[:, 0])
    torch.testing.assert_close(weights, gate.routed_scaling_factor * logits.softmax(-1).gather(-1, index))


def test_tokens_without_routes_route_themselves() -> None:
    model = build("mixtral", output_router_logits=False)
    router, inputs = RouterReplay(model), {"input_ids": batch(0, 0)["input_ids"]}
    with router.record() as record:
        _results(model, inputs)
        _results(model, inputs)
    own = record.routes[:10, :1]
    assert torch.equal(record.routes[10:, :1], own)
    given, positions = (record.routes[[7, 2]] + 1) % EXPERTS, torch.tensor([7, 2])
    with router.replay(given, positions), router.record() as partly:
        _results(model, inputs)
    assert torch.equal(partly.routes[positions], given)
    kept = [token for token in range(10) if token not in (2, 7)]
    assert torch.equal(partly.routes[kept, :1], own[kept])  # the first layer, whose inputs are unchanged


REPLAY = functools.partial(torch.zeros, dtype=torch.long)
REFUSED = {
    "floats": ((torch.zeros(10, 2, 2),), "expected integers, found torch.float32"),
    "layers": ((REPLAY(10, 3, 2),), "with 2 layers, found [10, 3, 2]"),
    "experts per token": ((REPLAY(10, 2, 1),), "expected 2 experts per token, as the router of"),
    "unknown expert": ((REPLAY(10, 2, 2) + 4,), "expected experts 0 to 3 in the layer 'model.layers.0.mlp.experts'"),
    "negative expert": ((REPLAY(10, 2, 2) - 1,), "found -1"),
    "tokens": ((REPLAY(9, 2, 2),), "expected routes of 10 tokens, as this rank's batch has, found 9"),
    "positions": ((REPLAY(2, 2, 2), [1, 1]), "each token once, found [2] with equal or negative ones"),
    "number of positions": ((REPLAY(2, 2, 2), [1]), "expected [2]"),
    "far position": ((REPLAY(2, 2, 2), [1, 10]), "expected tokens 0 to 9 of this rank's batch, found 10"),
}


def test_what_does_not_fit_is_refused_before_the_model_runs() -> None:
    model = build("mixtral", output_router_logits=False)
    router = RouterReplay(model)
    ran: list[Any] = []
    model.model.embed_tokens.register_forward_hook(lambda *_: ran.append(1))
    for arguments, words in REFUSED.values():
        with pytest.raises(DeepSpeedConfigError, match=re.escape(words)), router.replay(*arguments):
            model(input_ids=batch(0, 0)["input_ids"])
    assert not ran
    given = router.replay(REPLAY(10, 2, 2))
    with given, pytest.raises(CallOrderError, match="another replay is active"), router.replay(REPLAY(10, 2, 2)):
        pass
    with router.record() as record, pytest.raises(CallOrderError, match="expected a forward inside the context"):
        _ = record.routes
    with pytest.raises(DeepSpeedConfigError, match="Linear has none"), RouterReplay(nn.Linear(1, 1)).record():
        pass
