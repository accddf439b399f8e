"""Evaluation in all its forms, labels that only the first stage has, metrics, and data as programs have it."""

import re

import pytest
import torch

import deepspeed
from deepspeed.comm.base.counters import counted
from deepspeed.errors import PipelineError
from deepspeed.pipe import PipelineModule
from tests.harness.pool import run_ranks
from tests.parallel.pipe import support


def _close(found, expected):
    torch.testing.assert_close(
        torch.as_tensor(found).float().cpu(), torch.as_tensor(expected).float(), rtol=2e-6, atol=1e-6
    )


def _forms(stages, **given):
    engine = support.engine_of(stages, 1, 3, **given)
    here = engine._compute.is_last
    before = support.train(engine, 3, 1)
    data = support.items(7, 0, 3)
    mean = engine.eval_batch(iter(data))
    assert mean.shape == () and not mean.requires_grad and engine.module.training
    each = engine.eval_batch(iter(data), reduce_output=None)
    _close(sum(each) / 3, mean)
    loss, logits = engine.eval_batch(iter(data), return_logits=True)
    _close(loss, mean)
    loss, all_logits = engine.eval_batch(iter(data), return_logits="all")
    outputs = engine.eval_batch(iter(data), compute_loss=False, reduce_output=None)
    assert (outputs is None) is not here and (logits is None) is not here
    if here:
        for (_, labels), output, loss, same in zip(data, outputs, each, all_logits, strict=True):
            _close(support.loss_fn(output, labels), loss)
            assert torch.equal(output, same)
        assert torch.equal(outputs[-1], logits)
    alone = engine.eval_batch(iter(data), bcast_loss=False, reduce_output=None)
    assert (alone is None) is not here
    equal = [data[0]] * 2
    average = engine.eval_batch(iter(equal), compute_loss=False, num_micro_batches=2)
    if here:
        _close(average, outputs[0])
    # other micro-batches than in training, and training continues as if nothing had been
    engine.eval_batch(iter(support.items(8, 0, 5)), num_micro_batches=5)
    return mean.item(), before + support.train(engine, 3, 2, first=1)


def test_forms():
    expected, _ = run_ranks(support.reference, 1, 1, 3)[0]
    alone = run_ranks(_forms, 1, 1)
    for found in (alone, run_ranks(_forms, 2, 2), run_ranks(_forms, 2, 2, schedule="zbv")):
        for mean, result in found:
            _close(mean, alone[0][0])
            _close(result, expected)


def _mean_over_copies():
    engine = support.engine_of(1, 1, 2)
    data = [support.items(7, engine.grid.data_parallel_id, 1)[0][0][:, :4] for _ in range(2)]
    data = [(tokens, tokens) for tokens in data]
    with counted() as traffic:
        mean = engine.eval_batch(iter(data), compute_loss=False)
        tally = traffic.requested_along["all_reduce", "data"]
    outputs = engine.eval_batch(iter(data), compute_loss=False, reduce_output=None)
    return mean, torch.stack(outputs).mean(0), (tally.calls, tally.nbytes)


def test_outputs_are_averaged_over_copies_and_counted():
    found = run_ranks(_mean_over_copies, 2)
    own = [mean for _, mean, _ in found]
    assert not torch.equal(*own)
    for mean, _, sent in found:
        _close(mean, (own[0] + own[1]) / 2)
        assert sent == (1, 2 * mean.nbytes)


def _labels_from_the_first_stage():
    engine = support.engine_of(2, 1, 3)
    result = [
        engine.train_batch(iter(support.items(step, 0, 3)) if engine.is_first_stage() else None).item()
        for step in range(2)
    ]
    engine.eval_batch(iter(support.items(5, 0, 3)) if engine.is_first_stage() else None)
    # as programs do it that load on one rank only: None comes in where there is no iterator
    items = iter(support.items(2, 0, 3))
    engine.set_dataiterator(None)
    engine.set_batch_fn(lambda item: next(items) if item is None else item)
    return [*result, engine.train_batch().item()]


def _from_training_data():
    samples = [tuple(part[row] for part in support.items(0, 0, 1)[0]) for row in range(2)] * 4
    torch.manual_seed(3)
    module = PipelineModule(support.layers(), num_stages=2, loss_fn=_with_metrics)
    engine, _, loader, _ = deepspeed.initialize(model=module, config=support.config(1, 2), training_data=samples)
    assert loader is not None
    losses = [engine.train_batch().item() for _ in range(5)]  # more than the data has: it begins again
    assert engine.global_steps == 5 and engine.global_samples == 20 and engine.micro_steps == 10
    return losses, engine.metrics


def _with_metrics(logits, labels):
    return support.loss_fn(logits, labels), {"right": (logits.argmax(-1) == labels).float().mean()}


def test_data():
    expected, _ = run_ranks(support.reference, 1, 1, 3)[0]
    for result in run_ranks(_labels_from_the_first_stage, 2):
        _close(result, [loss for loss, _ in expected])
    (losses, metrics), other = run_ranks(_from_training_data, 2)
    assert other == (losses, metrics) and losses[-1] < losses[0] and 0 <= metrics["right"] <= 1


def _metrics_of(kind):
    calls = []

    def loss_fn(logits, labels):
        calls.append(kind)
        given = {
            "sometimes": {"always": 2.0, **({"odd": 4.0} if len(calls) % 2 else {})},
            "copies": {f"of rank {deepspeed.comm.get_rank()}": 1.0, "same": torch.tensor([3.0], requires_grad=True)},
            "text": {"name": "a word"},
            "several": {"scores": torch.ones(3)},
        }
        return support.loss_fn(logits, labels), given[kind]

    stages = 1 if kind == "copies" else 2
    module = PipelineModule(support.layers(), num_stages=stages, loss_fn=loss_fn)
    engine, *_ = deepspeed.initialize(model=module, config=support.config(1, 3))
    try:
        support.train(engine, 3, 1)
    except PipelineError as error:
        return str(error)
    return engine.metrics


def test_metrics_count_where_they_are_given():
    for found in run_ranks(_metrics_of, 2, "sometimes"):
        assert found == {"always": 2.0, "odd": 4.0}
    for found in run_ranks(_metrics_of, 2, "copies"):
        assert found == {"of rank 0": 1.0, "same": 3.0, "of rank 1": 1.0}


@pytest.mark.parametrize(("kind", "what"), [("text", "'name', .* 'a word'"), ("several", "'scores', .* shape .3,.")])
def test_metrics_that_are_no_numbers(kind, what):
    for text in run_ranks(_metrics_of, 2, kind):
        assert re.match(f"train_batch: stage 1 .*micro-batch 0.*the metric {what}.* expected a number", text), text
