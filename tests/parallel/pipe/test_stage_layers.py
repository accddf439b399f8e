"""Losses of layers on several stages: the same losses, norms and weights as one process of plain torch."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.errors import PipelineError
from deepspeed.parallel.pipe.stage_layers import run_collecting
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec, add_loss
from tests.harness.pool import run_ranks

VOCABULARY, WIDTH, COUNT = 11, 6, 4


class Embed(nn.Module):
    """Tokens to vectors; tokens go along for the losses of later stages."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 3)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.embedding(tokens, self.weight), tokens


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, tokens = value
        made = torch.tanh(self.inner(self.norm(hidden)))
        add_loss("size", made.square().mean() / 10)  # one name for all blocks, as of a balance of experts
        return hidden + made, tokens


class Ahead(nn.Module):
    """Predicts the token ``depth`` further on by a head of its own, and passes on what it got."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, tokens = value
        logits = self.head(hidden[:, : -self.depth]).flatten(0, 1)
        add_loss(f"ahead {self.depth}", 0.3 * F.cross_entropy(logits, tokens[:, self.depth :].flatten()))
        return value


def _head(module: Embed, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return value[0] @ module.weight.T


def _layers() -> list[Any]:
    blocks = [LayerSpec(Block), LayerSpec(Ahead, 2), LayerSpec(Block), LayerSpec(Block), LayerSpec(Ahead, 3)]
    return [TiedLayerSpec("embed", Embed), *blocks, TiedLayerSpec("embed", Embed, forward_fn=_head)]


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def _items(step: int, copy: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(100 * step + copy)
    tokens = [torch.randint(VOCABULARY, (2, 5 + number), generator=made) for number in range(COUNT)]
    return [(item, item) for item in tokens]


def _module(stages: int, **given: Any) -> PipelineModule:
    torch.manual_seed(3)
    return PipelineModule(_layers(), num_stages=stages, loss_fn=_loss, **given)


def _reference(copies: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    module = _module(1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    rows = []
    for step in range(2):
        row: dict[str, float] = {}
        for copy in range(copies):
            for tokens, labels in _items(step, copy):
                terms = {"loss": _loss(module(tokens), labels), **module.added_losses}
                total = torch.stack(list(terms.values())).sum()
                (total / COUNT / copies).backward()
                for name, term in {**terms, "loss": total}.items():
                    row[name] = row.get(name, 0.0) + term.item() / COUNT / copies
        row["norm"] = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5).item()
        optimizer.step()
        optimizer.zero_grad()
        rows.append(row)
    with torch.no_grad():
        evaluated = [
            _loss(module(tokens), labels) + sum(module.added_losses.values()) for tokens, labels in _items(7, 0)
        ]
    rows.append({"loss": torch.stack(evaluated).mean().item()})
    return rows, {name: value.detach().clone() for name, value in module.named_parameters()}


@cache
def _expected(copies: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    return run_ranks(_reference, 1, copies)[0]


def _train(stages: int, stage: int, more: dict[str, Any], given: dict[str, Any]) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        **more,
    }
    engine, *_ = deepspeed.initialize(model=_module(stages, **given), config=config)
    rows = []
    for step in range(2):
        loss = engine.train_batch(iter(_items(step, engine.grid.data_parallel_id))).item()
        rows.append({"loss": loss, **engine.metrics, "norm": engine.get_global_grad_norm()})
    rows.append({"loss": engine.eval_batch(iter(_items(7, 0))).item()})
    logits = engine.eval_batch(iter(_items(7, 0)), compute_loss=False, reduce_output=None)
    assert logits is None or all(isinstance(made, torch.Tensor) for made in logits)
    return rows, {name: value.clone() for name, value in engine.iter_full("fp32")}


def _compare(results: list[Any], copies: int, rtol: float = 2e-6, atol: float = 2e-6) -> None:
    expected, weights = _expected(copies)
    for rows, values in results:
        for row, wanted in zip(rows, expected, strict=True):
            assert row.keys() == wanted.keys()
            for name, value in row.items():
                assert value == pytest.approx(wanted[name], rel=rtol, abs=atol), name
        for name, value in values.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=5 * atol)
    assert {name for _, values in results for name in values} == weights.keys()


@pytest.mark.parametrize(
    ("world", "stages", "stage", "given"),
    [
        (1, 1, 0, {}),
        (2, 2, 1, {"schedule": "zb-h1"}),
        (2, 2, 2, {"activation_checkpoint_interval": 2}),
        (2, 2, 0, {"schedule": "interleaved", "num_chunks": 2}),
        (4, 2, 3, {"schedule": "zbv"}),
        (4, 4, 1, {"partition_method": "plan", "sample": (torch.zeros(2, 6).long(), torch.zeros(2, 6).long())}),
    ],
)
def test_equal_to_one_process(world, stages, stage, given):
    _compare(run_ranks(_train, world, stages, stage, {}, given), world // stages)


def test_reentrant_recomputation_and_loss_scale():
    scaled = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    results = run_ranks(_train, 2, 2, 1, scaled, {"activation_checkpoint_interval": 1})
    expected, _ = _expected(1)
    assert all(rows[1]["loss"] == pytest.approx(expected[1]["loss"], rel=5e-3) for rows, _ in results)
    reentrant = {"pipeline": {"use_reentrant": True}}
    _compare(run_ranks(_train, 2, 2, 1, reentrant, {"activation_checkpoint_interval": 2}), 1)


def test_what_is_no_loss_is_refused():
    with pytest.raises(PipelineError, match=r"add_loss\('ahead'\): expected a floating tensor .* shape \(3,\)"):
        add_loss("ahead", torch.zeros(3))
    with pytest.raises(PipelineError, match=r"add_loss\('ahead'\): .* found none running"):
        add_loss("ahead", torch.zeros(()))

    def inside_reentrant(value: torch.Tensor) -> torch.Tensor:
        def layer(inner: torch.Tensor) -> torch.Tensor:
            add_loss("ahead", inner.sum())
            return inner * 2

        return checkpoint(layer, value, use_reentrant=True)

    with pytest.raises(PipelineError, match="Call add_loss after the block"):
        run_collecting(inside_reentrant, torch.ones(2, requires_grad=True))


def test_a_layer_that_recomputes_a_part_adds_once():
    def layer(value: torch.Tensor) -> torch.Tensor:
        def part(inner: torch.Tensor) -> torch.Tensor:
            made = inner.exp()
            add_loss("part", made.sin().sum())
            return made * 2

        return checkpoint(part, value, use_reentrant=False)

    given = torch.ones(2, requires_grad=True)
    made = run_collecting(layer, given)
    (made.outputs.sum() + made.losses["part"]).backward()
    plain = torch.ones(2, requires_grad=True)
    (plain.exp() * 2 + plain.exp().sin()).sum().backward()
    assert torch.equal(given.grad, plain.grad)
