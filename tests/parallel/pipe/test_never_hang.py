"""Whatever goes wrong on one stage ends the step on all of them, soon, with the first cause and where it was."""

import os
import time
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedError, PipelineError
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from tests.harness.pool import run_ranks
from tests.parallel.pipe.test_what_crosses import items, mean_square

SOON = 45.0  # seconds, on a busy machine


class Fails(nn.Module):
    """Fails in the forward, or the backward, of the micro-batch that has so many rows."""

    def __init__(self, forward: int = -1, backward: int = -1) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rows = (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward, backward = self.rows
        if len(x) == forward:
            raise ArithmeticError("this layer cannot take it")
        out = self.layer(x)
        if len(x) == backward:
            out.register_hook(_fail)
        return out


def _fail(gradient: torch.Tensor) -> None:
    raise ArithmeticError("this gradient is not wanted")


def engine_of(layers: list[Any], stages: int, count: int, loss_fn: Any = mean_square, **given: Any) -> Any:
    module = PipelineModule(layers, num_stages=stages, loss_fn=loss_fn, partition_method="uniform", **given)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    }
    return deepspeed.initialize(model=module, config=config)[0]


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


def raised_by(call: Any) -> tuple[str, float]:
    """What it raised, and after how long. Returns when all ranks have it: nobody learns it from a rank that ends."""
    start, text = time.monotonic(), "nothing"
    try:
        call()
    except PipelineError as error:
        text = f"PipelineError: {error}"
    except DeepSpeedError as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    store, world = torch.distributed.distributed_c10d._get_default_store(), int(os.environ["WORLD_SIZE"])
    number = store.add(f"reported by {os.environ['RANK']}", 1)
    deadline = time.monotonic() + 2 * SOON
    while any(store.add(f"reported by {rank}", 0) < number for rank in range(world)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return text, seconds


def fail_in_a_layer(schedule: str, at: int, **how: int) -> tuple[str, float]:
    layers: list[Any] = linears(6)
    layers[at] = Fails(**how)
    engine = engine_of(layers, 3, 4, schedule=schedule)
    engine.train_batch(iter(items(2, 2, 2, 2)))
    return raised_by(lambda: engine.train_batch(iter(items(2, 2, 5, 2))))


@pytest.mark.parametrize(
    ("schedule", "at", "how", "place", "cause"),
    [
        ("1f1b", 1, {"backward": 5}, ("stage 0 (rank 0)", "backward of micro-batch 2"), "this gradient is not"),
        ("zbv", 3, {"backward": 5}, ("rank", "backward", "of micro-batch 2"), "this gradient is not wanted"),
    ],
)
def test_an_exception_on_one_stage(schedule, at, how, place, cause):
    for text, seconds in run_ranks(fail_in_a_layer, 3, schedule, at, **how):
        assert text.startswith("PipelineError: train_batch: ") and "ArithmeticError" in text and cause in text
        assert all(word in text for word in place), text
        assert seconds < SOON


def run_out_of_data() -> list[tuple[str, float] | float]:
    engine = engine_of(linears(2), 2, 3)
    here = engine.is_first_stage()
    text: list[Any] = [raised_by(lambda: engine.train_batch(iter(items(2, 2) if here else items(2, 2, 2))))]
    # No weight has changed: the engine continues.
    text.append(engine.train_batch(iter(items(2, 2, 2))).item())
    text.append(raised_by(lambda: engine.train_batch(iter(items(2, 2, 2)) if here else iter(_broken()))))
    return text


def _broken() -> Any:
    yield items(2)[0]
    raise OSError("the disk is gone")


def test_the_end_of_the_data_and_a_loader_that_fails():
    for ended, loss, broken in run_ranks(run_out_of_data, 2):
        assert "data of stage 0 (rank 0) ended after 2 of 3 micro-batches" in ended[0] and ended[1] < SOON
        assert loss > 0
        assert "stage 1 (rank 1), pulling data: OSError: the disk is gone" in broken[0] and broken[1] < SOON


def give_what_is_no_pair() -> list[tuple[str, float]]:
    engine = engine_of(linears(2), 2, 2)
    return [raised_by(lambda: engine.train_batch(iter([torch.ones(2, 4)] * 2)))]


def test_items_that_are_no_pairs():
    for ((text, seconds),) in run_ranks(give_what_is_no_pair, 2):
        assert "expected pairs (inputs, labels)" in text and "PipelineError" in text and seconds < SOON


def lose_in_another_way(kind: str) -> tuple[str, float]:
    losses = {
        "raises": lambda outputs, labels: {}["no such key"],
        "not scalar": lambda outputs, labels: outputs - labels,
        "no gradient": lambda outputs, labels: (outputs.detach() - labels).mean(),
    }
    engine = engine_of(linears(2), 2, 2, losses[kind])
    return raised_by(lambda: engine.train_batch(iter(items(2, 2))))


@pytest.mark.parametrize(
    ("kind", "words"), [("raises", "KeyError: 'no such key'"), ("not scalar", "loss"), ("no gradient", "gradient")]
)
def test_a_loss_function_that_is_wrong(kind, words):
    for text, seconds in run_ranks(lose_in_another_way, 2, kind):
        assert text.startswith("PipelineError: train_batch: stage 1 (rank 1)") and words in text and seconds < SOON


def count_differently() -> tuple[str, float]:
    engine = engine_of(linears(2), 2, 2)
    if engine.is_last_stage():
        engine.set_train_batch_size(6)
    return raised_by(lambda: engine.train_batch(iter(items(2, 2, 2))))


def test_another_number_of_micro_batches_on_one_stage():
    for text, seconds in run_ranks(count_differently, 2):
        assert "micro-batches" in text and "PipelineError" in text and seconds < SOON
        assert "the same number of micro-batches on all ranks of a pipeline" in text


def tie_differently() -> tuple[str, float]:
    width = 5 + int(os.environ["RANK"])
    layers = [TiedLayerSpec("key", nn.Linear, 4, width), nn.Linear(width, 4), TiedLayerSpec("key", nn.Linear, 4, width)]
    return raised_by(lambda: engine_of([*layers, nn.Identity()], 2, 2))


def test_tied_weights_of_another_shape_on_one_stage():
    for text, seconds in run_ranks(tie_differently, 2):
        assert "key" in text and "(5, 4)" in text and "(6, 4)" in text and seconds < SOON


def tie_under_other_seeds() -> torch.Tensor:
    torch.manual_seed(int(os.environ["RANK"]))
    layers = [TiedLayerSpec("key", nn.Linear, 4, 4), *linears(2), TiedLayerSpec("key", nn.Linear, 4, 4)]
    engine = engine_of(layers, 2, 2)
    return next(engine.module.tied_modules["key"].parameters()).detach().clone()


def test_tied_weights_begin_equal_whatever_the_ranks_drew():
    first, second = run_ranks(tie_under_other_seeds, 2)
    assert torch.equal(first, second) and first.any()


def fail_in_evaluation() -> list[Any]:
    engine = engine_of([nn.Linear(4, 4), Fails(forward=5)], 2, 2)
    first = engine.train_batch(iter(items(2, 2))).item()
    text = raised_by(lambda: engine.eval_batch(iter(items(2, 5))))
    return [first, text]


def test_an_exception_in_evaluation():
    for first, (text, seconds) in run_ranks(fail_in_evaluation, 2):
        assert first > 0 and seconds < SOON
        assert text.startswith("PipelineError: eval_batch: stage 1 (rank 1)") and "this layer cannot take it" in text


def call_after_a_failure() -> list[Any]:
    engine = engine_of([nn.Linear(4, 4), Fails(forward=5)], 2, 2)
    return [
        raised_by(lambda: engine.train_batch(iter(items(2, 5)))),
        raised_by(lambda: engine.train_batch(iter(items(2, 2)))),
        raised_by(lambda: engine.eval_batch(iter(items(2, 2)))),
    ]


def test_calls_after_a_failure_name_its_cause():
    for first, *later in run_ranks(call_after_a_failure, 2):
        for call, (text, seconds) in zip(("train_batch", "eval_batch"), later, strict=True):
            assert text.startswith(f"PipelineError: {call}: an earlier call failed, and the ranks are no longer connec")
            assert first[0].removeprefix("PipelineError: ") in text and seconds < SOON


def call_differently() -> list[Any]:
    engine = engine_of(linears(2), 2, 2)
    call = engine.train_batch if engine.is_first_stage() else engine.eval_batch
    text = raised_by(lambda: call(iter(items(2, 2))))
    return [text, engine.train_batch(iter(items(2, 2))).item()]  # nothing was computed: the engine continues


def test_another_call_on_one_stage():
    (first, loss), (second, other) = run_ranks(call_differently, 2)
    assert first[0].startswith("PipelineError: train_batch: rank 0 calls it, rank 1 calls eval_batch. No weight has")
    assert second[0].startswith("PipelineError: eval_batch: rank 1 calls it, rank 0 calls train_batch")
    assert loss == other > 0


class Gives(nn.Module):
    def __init__(self, given: Any) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(4, 4), given

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x), self.given()


def send_what_cannot_be_sent() -> tuple[str, float]:
    engine = engine_of([Gives(lambda: (i for i in range(3))), nn.Linear(4, 4)], 2, 2)
    return raised_by(lambda: engine.train_batch(iter(items(2, 2))))


def test_what_cannot_be_sent():
    for text, seconds in run_ranks(send_what_cannot_be_sent, 2):
        assert "stage 0 (rank 0), sending the activations of micro-batch 0" in text and seconds < SOON
        assert "cannot be sent (cannot pickle 'generator' object); let its last layer return tensors" in text
