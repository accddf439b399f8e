"""A loss_fn that returns (sum, count): any split of the same samples gives the update of plain torch."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deepspeed
from deepspeed.errors import CallOrderError, DeepSpeedConfigError, PipelineError
from deepspeed.pipe import LayerSpec, PipelineModule, add_loss
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks
from tests.harness.pool import run_ranks
from tests.parallel.pipe.support import VOCABULARY, config, layers

SAMPLES, LENGTH, STEPS = 8, 6, 2


class Added(nn.Module):
    """Adds a mean over the tokens that count, which the labels say."""

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, mask = value
        add_loss("size", (hidden.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1) / 10)
        return value


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels ``[samples, length]``: each sample has another number of labels, one has none."""
    made = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=made) for _ in range(2))
    labels[torch.arange(LENGTH) >= (torch.arange(SAMPLES) * 3 % LENGTH)[:, None]] = -100
    return tokens, labels


def _sum(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def _sum_with_metric(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    return *_sum(logits, labels), {"largest": logits.max()}


def _layers(adds: bool) -> list[Any]:
    row = layers()
    return [*row[:3], LayerSpec(Added), *row[3:]] if adds else row


def _reference(adds: bool) -> Any:
    torch.manual_seed(3)
    module = PipelineModule(_layers(adds), num_stages=1, loss_fn=_sum)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    rows = []
    for step in range(STEPS):
        tokens, labels = _batch(step)
        loss, counted, samples = 0.0, (labels != -100).sum(), zip(tokens.split(1), labels.split(1), strict=True)
        if adds:  # weighed by the tokens of a micro-batch; here each has one sample
            for one, label in samples:
                total, count = _sum(module(one), label)
                loss = loss + (total + count * module.added_losses["size"]) / counted
        else:
            loss = _sum(module(tokens), labels)[0] / counted
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss.item(), norm.item()))
    return rows, {name: value.detach().clone() for name, value in module.named_parameters()}


@cache
def _expected(adds: bool) -> Any:
    return run_ranks(_reference, 1, adds)[0]


def _train(cells: list[Any]) -> Any:
    """Trains on this copy's samples, cut into micro-batches."""
    results = []
    for stages, accumulation, given, more in cells:
        torch.manual_seed(3)
        adds = more.pop("adds", False)
        module = PipelineModule(_layers(adds), num_stages=stages, loss_fn=more.pop("loss_fn", _sum), **given)
        merged = config(more.pop("stage", 1), accumulation, **{"train_micro_batch_size_per_gpu": 1, **more})
        engine, *_ = deepspeed.initialize(model=module, config=merged)
        copies, copy = engine.grid.data_parallel_size, engine.grid.data_parallel_id
        rows = []
        for step in range(STEPS):
            items = [part.tensor_split(copies)[copy].tensor_split(accumulation) for part in _batch(step)]
            loss = engine.train_batch(iter(list(zip(*items, strict=True))))
            rows.append((loss.item(), engine.get_global_grad_norm()))
        evaluated = engine.eval_batch(iter(list(zip(*items, strict=True)))).item()
        if adds or engine.metrics:
            assert set(engine.metrics) & {"size", "largest"}
        results.append((rows, {name: value.clone() for name, value in engine.iter_full("fp32")}, evaluated))
        engine.destroy()
    return results


CELLS: dict[int, list[Any]] = {
    1: [(1, 1, {}, {"stage": 0}), (1, 3, {}, {"loss_fn": _sum_with_metric}), (1, 8, {}, {"adds": True})],
    2: [
        (2, 4, {"schedule": "zb-h1"}, {"stage": 2}),
        (2, 8, {"activation_checkpoint_interval": 2}, {"adds": True}),
        (2, 3, {"schedule": "zbv"}, {"stage": 3}),
        (1, 2, {}, {"stage": 1, "loss_fn": _sum_with_metric}),
    ],
    4: [(2, 3, {}, {"stage": 1}), (2, 4, {"schedule": "dualpipev"}, {"adds": True, "stage": 2})],
}


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_split_of_the_samples_gives_one_update(world):
    cells = CELLS[world]
    for results in run_ranks(_train, world, cells):
        evaluated = [value for *_, value in results]
        for (*_, more), (rows, values, _) in zip(cells, results, strict=True):
            expected, weights = _expected(more.get("adds", False))
            torch.testing.assert_close(torch.tensor(rows), torch.tensor(expected), rtol=5e-6, atol=5e-6)
            for name, value in values.items():
                torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-5, msg=f"{name} of {more}")
        plain = [value for (*_, more), value in zip(cells, evaluated, strict=True) if not more.get("adds")]
        assert plain == pytest.approx([plain[0]] * len(plain), rel=1e-5)


def test_loss_scale_of_fp16():
    more = {"fp16": {"enabled": True, "initial_scale_power": 6}}
    for results in run_ranks(_train, 2, [(2, 3, {}, more)]):
        expected, _ = _expected(False)
        torch.testing.assert_close(torch.tensor(results[0][0]), torch.tensor(expected), rtol=2e-2, atol=1e-3)


def _differently(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    total, count = _sum(logits, labels)
    return (total, count) if torch.distributed.get_rank() == 0 else total / count.clamp(min=1)


def _negative(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    return _sum(logits, labels)[0], -1


def _as_words(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    return _sum(logits, labels)[0], "tokens"


@on_ranks(2)
def test_losses_that_do_not_fit_together_are_refused_on_every_rank() -> None:
    found = []
    for loss_fn in (_differently, _negative, _as_words):
        with pytest.raises((PipelineError, DeepSpeedConfigError, CallOrderError)) as caught:
            _train([(1, 2, {}, {"loss_fn": loss_fn})])
        found.append(str(caught.value))
    mixed, negative, words = found
    assert "the loss_fn of rank 0 returns (sum, count), that of rank 1 a mean" in mixed
    assert "count=-1" in negative
    assert "expected the number of tokens in this rank's loss" in words


def _transformers(cells: list[Any]) -> Any:
    """The decoder of Transformers, with ranks along several axes."""
    from tests.parallel.sequence.llama import llama

    results = []
    for stages, accumulation, more in cells:
        module = PipelineModule.from_transformers(llama(), stages, token_mean=True)
        sharers = more.get("sequence_parallel_size", 1)
        merged = config(1, accumulation, **{"train_micro_batch_size_per_gpu": 1, **more})
        engine, *_ = deepspeed.initialize(model=module, config=merged)
        rank, length = torch.distributed.get_rank(), LENGTH // sharers
        place = slice(rank % sharers * length, (rank % sharers + 1) * length)
        tokens, labels = _batch(1)
        positions = torch.arange(LENGTH).expand(SAMPLES // accumulation, LENGTH)
        items = []
        for one, label in zip(tokens.chunk(accumulation), labels.chunk(accumulation), strict=True):
            following = F.pad(label[:, 1:], (0, 1), value=-100)
            given = {"input_ids": one[:, place], "position_ids": positions[:, place]}
            items.append((given, {"shift_labels": following[:, place]}))
        loss = engine.train_batch(iter(items)).item()
        names = module.names_in_transformers()
        values = {}
        for name, value in engine.iter_full("fp32"):
            beginning = next(one for one in names if name.startswith(one))
            values[names[beginning] + name.removeprefix(beginning)] = value.clone()
        results.append((loss, values))
        engine.destroy()
    return results


def _plain_transformers() -> Any:
    from tests.parallel.sequence.llama import llama

    model = llama()
    tokens, labels = _batch(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    total, count = _sum(model(tokens, use_cache=False).logits[:, :-1], labels[:, 1:])
    (total / count).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return (total / count).item(), {name: value.detach().clone() for name, value in model.named_parameters()}


TRANSFORMERS = {
    2: [(2, 4, {}), (1, 2, {"sequence_parallel_size": 2}), (1, 4, {"tensor_parallel": {"autotp_size": 2}})],
    4: [
        (2, 2, {"sequence_parallel_size": 2}),
        (2, 4, {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}}),
    ],
}


@needs_transformers
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_from_transformers_along_every_axis(world):
    expected, weights = run_ranks(_plain_transformers, 1)[0]
    for results in run_ranks(_transformers, world, TRANSFORMERS[world]):
        for loss, values in results:
            assert loss == pytest.approx(expected, rel=1e-5)
            for name, value in values.items():
                torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=2e-5, msg=name)
