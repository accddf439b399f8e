"""Messages about mistakes in a first pipeline program, and the mean of outputs over the copies of the model."""

import logging

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import PipelineError
from deepspeed.logging import logger
from deepspeed.parallel.pipe.schedule import lists
from deepspeed.pipe import PipelineModule
from tests.harness import on_ranks
from tests.harness.pool import run_ranks


def _engine(layers, loss_fn=nn.functional.mse_loss, micro_batch=4, steps=1):
    module = PipelineModule(layers, num_stages=1, loss_fn=loss_fn)
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": steps,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return deepspeed.initialize(model=module, config=config)[0]


def _raised(engine, inputs, labels):
    with pytest.raises(PipelineError) as caught:
        engine.train_batch(iter([(inputs, labels)]))
    return str(caught.value)


def _mistakes():
    def forgets_to_reduce(outputs, labels):
        return outputs - labels

    rows = torch.ones(4, 16)
    return {
        "no loss_fn": _raised(_engine([nn.Linear(16, 16)], None), rows, rows),
        "not reduced": _raised(_engine([nn.Linear(16, 16)], forgets_to_reduce), rows, rows),
        "width": _raised(_engine([nn.Linear(8, 8), nn.ReLU()]), rows, rows),
        "labels": _raised(_engine([nn.Linear(16, 4)], nn.functional.nll_loss), rows, torch.ones(3, dtype=torch.long)),
    }


def test_mistakes_name_what_to_change():
    text = run_ranks(_mistakes, 1)[0]
    begin = "train_batch: stage 0 (rank 0), forward of micro-batch 0"
    assert text["no loss_fn"] == (
        f"{begin}: PipelineModule(loss_fn=None): the output of the last layer is the loss then, expected a tensor of "
        "one element, found shape (4, 16). Pass PipelineModule(..., loss_fn=...), called as loss_fn(outputs, labels)"
    )
    assert "PipelineModule(loss_fn=...): expected a tensor of one element" in text["not reduced"]
    assert "returned shape (4, 16). Reduce it in loss_fn" in text["not reduced"]
    assert text["width"].startswith(f"{begin}, layer 0, Linear, input (4, 16): RuntimeError: ")
    assert text["labels"].startswith(f"{begin}, loss_fn nll_loss, outputs (4, 4), labels (3,): ValueError: ")


def test_every_instruction_has_words():
    kinds = [
        kind for kind in vars(lists).values() if isinstance(kind, type) and issubclass(kind, lists.PipeInstruction)
    ]
    concrete = [kind for kind in kinds if kind not in (lists.PipeInstruction, lists.BufferOpInstruction)]
    assert len({kind.words for kind in concrete}) == len(concrete) == 12
    assert lists.RecvGrad(1, micro_batch=3).describe() == "receiving the gradients of micro-batch 3"
    assert lists.ForwardPass(1).describe() == "forward in buffer 1"


@on_ranks(1)
def test_train_batch_without_a_pipeline() -> None:
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config={"train_micro_batch_size_per_gpu": 1})
    assert not hasattr(engine, "eval_batch") and not hasattr(engine, "of_nobody")
    with pytest.raises(AttributeError) as caught:
        engine.train_batch()
    text = str(caught.value)
    assert text == (
        "neither the engine nor the wrapped Linear has 'train_batch'. engine.train_batch is for pipelines: expected a "
        "deepspeed.pipe.PipelineModule in initialize(model=...). For any other model call loss = engine(...), "
        "engine.backward(loss), engine.step()"
    )


def _warnings_of_rows(rows, configured, pipeline):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        if pipeline:
            engine = _engine([nn.Linear(4, 4), nn.Linear(4, 1)], micro_batch=configured, steps=2)
            for _ in range(2):
                engine.train_batch(iter([(torch.ones(rows, 4), torch.ones(rows, 1))] * 2))
        else:
            config = {
                "train_micro_batch_size_per_gpu": configured,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            }
            engine, *_ = deepspeed.initialize(model=nn.Linear(4, 1), config=config)
            with torch.no_grad():
                engine.eval()(torch.ones(7, 4))  # an evaluation may have any number of rows
            engine.train()
            for _ in range(2):
                engine.backward(engine(torch.ones(rows, 4)).sum())
                engine.step()
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if line.startswith("train_micro_batch_size_per_gpu=")]


@pytest.mark.parametrize("pipeline", [False, True])
def test_other_rows_than_the_micro_batch_are_warned_of_once(pipeline):
    assert run_ranks(_warnings_of_rows, 1, 2, 2, pipeline) == [[]]
    ((line,),) = run_ranks(_warnings_of_rows, 1, 4, 2, pipeline)
    assert "expected inputs of 2 row(s), found 4 in the first training batch" in line and "batch_size" in line


@on_ranks(2)
def test_the_mean_of_outputs_is_over_micro_batches_and_copies() -> None:
    engine = _engine([nn.Identity(), nn.Linear(2, 2)], steps=2)
    copy = engine.grid.data_parallel_id
    values = [torch.full((4, 2), float(10 * copy + number)) for number in range(2)]
    mean = engine.eval_batch(iter([(value, None) for value in values]), compute_loss=False)
    expected = engine.module(torch.full((4, 2), (0 + 1 + 10 + 11) / 4)).detach()
    each = engine.eval_batch(iter([(value, None) for value in values]), compute_loss=False, reduce_output=None)
    uneven = [(torch.ones(4 + copy, 2), None)] * 2
    with pytest.raises(PipelineError) as caught:
        engine.eval_batch(iter(uneven), compute_loss=False)
    again = engine.eval_batch(iter([(value, None) for value in values]), compute_loss=False)
    torch.testing.assert_close(mean, expected)
    assert torch.equal(mean, again) and len(each) == 2
    text = str(caught.value)
    assert "found (4, 2) in micro-batch 0 of rank 0 and (5, 2) in micro-batch 0 of rank 1. Pad the inputs" in text
