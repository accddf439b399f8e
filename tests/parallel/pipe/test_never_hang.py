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
from tests.harness import on_ranks, run_ranks
from tests.harness.errors import RankDied
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
    ("schedule", "at", "how", "words"),
    [
        ("1f1b", 1, {"forward": 5}, ["stage 0 (rank 0), forward of micro-batch 2, layer 1, Fails, input (5, 4): "]),
        ("1f1b", 1, {"backward": 5}, ["stage 0 (rank 0), backward of micro-batch 2", "this gradient is not wanted"]),
        ("zbv", 3, {"backward": 5}, ["rank", "backward", "of micro-batch 2", "this gradient is not wanted"]),
    ],
)
def test_an_exception_on_one_stage(schedule, at, how, words):
    for text, seconds in run_ranks(fail_in_a_layer, 3, schedule, at, **how):
        assert text.startswith("PipelineError: train_batch: ") and "ArithmeticError" in text
        assert all(word in text for word in words), text
        assert seconds < SOON


def _broken() -> Any:
    yield items(2)[0]
    raise OSError("the disk is gone")


@on_ranks(2)
def test_the_end_of_the_data_and_a_loader_that_fails() -> None:
    engine = engine_of(linears(2), 2, 3)
    before = [parameter.clone() for parameter in engine.module.parameters()]
    here, whole = engine.is_first_stage(), items(2, 2, 2)
    raised = [
        raised_by(lambda: engine.train_batch(iter(items(2, 2) if here else whole))),
        raised_by(lambda: engine.train_batch(iter([]) if here else None)),
    ]
    engine.set_train_batch_size(2 * (2 if here else 3))
    raised.append(raised_by(lambda: engine.train_batch(iter(whole))))
    engine.set_train_batch_size(2 * 3)
    same = all(map(torch.equal, before, engine.module.parameters()))
    loss = engine.train_batch(iter(whole)).item()  # no weight has changed: the engine continues
    raised.append(raised_by(lambda: engine.train_batch(iter(whole) if here else iter(_broken()))))
    ended, empty, counts, broken = raised
    assert ended[0] == (
        "PipelineError: train_batch: the data of stage 0 (rank 0) ended after 2 of 3 micro-batches, so micro-batch "
        "2 is missing. No weight has changed; give the ranks that load data loaders of equal length, or a "
        "RepeatingLoader"
    )
    assert "the data of stage 0 (rank 0) ended after 0 of 3" in empty[0]
    assert "stage 1 (rank 1), pulling data: OSError: the disk is gone" in broken[0]
    assert "the same number of micro-batches on all ranks of a pipeline" in counts[0]
    assert "3 on rank 1" in counts[0] and "2 on rank 0" in counts[0]
    assert all(seconds < SOON for _, seconds in (ended, empty, broken, counts)) and same and loss > 0


class Gives(nn.Module):
    def __init__(self, given: Any) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(4, 4), given

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x), self.given()


def no_pairs() -> tuple[str, float]:
    return raised_by(lambda: engine_of(linears(2), 2, 2).train_batch(iter([torch.ones(2, 4)] * 2)))


def a_loss_that_raises() -> tuple[str, float]:
    engine = engine_of(linears(2), 2, 2, lambda outputs, labels: {}["no such key"])
    return raised_by(lambda: engine.train_batch(iter(items(2, 2))))


def a_loss_without_gradient() -> tuple[str, float]:
    engine = engine_of(linears(2), 2, 2, lambda outputs, labels: (outputs.detach() - labels).mean())
    return raised_by(lambda: engine.train_batch(iter(items(2, 2))))


def ties_of_two_shapes() -> tuple[str, float]:
    width = 5 + int(os.environ["RANK"])
    layers = [TiedLayerSpec("key", nn.Linear, 4, width), nn.Linear(width, 4), TiedLayerSpec("key", nn.Linear, 4, width)]
    return raised_by(lambda: engine_of([*layers, nn.Identity()], 2, 2))


def an_exception_in_evaluation() -> tuple[str, float]:
    engine = engine_of([nn.Linear(4, 4), Fails(forward=5)], 2, 2)
    assert engine.train_batch(iter(items(2, 2))).item() > 0
    return raised_by(lambda: engine.eval_batch(iter(items(2, 5))))


def what_cannot_be_sent() -> tuple[str, float]:
    engine = engine_of([Gives(lambda: (i for i in range(3))), nn.Linear(4, 4)], 2, 2)
    return raised_by(lambda: engine.train_batch(iter(items(2, 2))))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (no_pairs, ["expected pairs (inputs, labels)"]),
        (a_loss_that_raises, ["train_batch: stage 1 (rank 1)", "KeyError: 'no such key'"]),
        (a_loss_without_gradient, ["train_batch: stage 1 (rank 1)", "gradient"]),
        (ties_of_two_shapes, ["key", "(5, 4)", "(6, 4)"]),
        (an_exception_in_evaluation, ["eval_batch: stage 1 (rank 1)", "this layer cannot take it"]),
        (
            what_cannot_be_sent,
            [
                "stage 0 (rank 0), sending the activations of micro-batch 0",
                "cannot be sent (cannot send a 'generator' object); let its last layer return tensors",
            ],
        ),
    ],
)
def test_both_ranks_raise_the_cause(body, words):
    for text, seconds in run_ranks(body, 2):
        assert seconds < SOON and all(word in text for word in ("Error: ", *words)), text


def tie_under_other_seeds() -> torch.Tensor:
    torch.manual_seed(int(os.environ["RANK"]))
    layers = [TiedLayerSpec("key", nn.Linear, 4, 4), *linears(2), TiedLayerSpec("key", nn.Linear, 4, 4)]
    engine = engine_of(layers, 2, 2)
    return next(engine.module.tied_modules["key"].parameters()).detach().clone()


def test_tied_weights_begin_equal_whatever_the_ranks_drew():
    first, second = run_ranks(tie_under_other_seeds, 2)
    assert torch.equal(first, second) and first.any()


@on_ranks(2)
def test_calls_after_a_failure_name_its_cause() -> None:
    engine = engine_of([nn.Linear(4, 4), Fails(forward=5)], 2, 2)
    first, *later = [
        raised_by(lambda: engine.train_batch(iter(items(2, 5)))),
        raised_by(lambda: engine.train_batch(iter(items(2, 2)))),
        raised_by(lambda: engine.eval_batch(iter(items(2, 2)))),
    ]
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


class Dies(nn.Module):
    def forward(self, value: Any) -> Any:
        os._exit(7)


def _dies() -> None:
    engine_of([nn.Linear(4, 4), Dies()], 2, 2).train_batch(iter(items(2, 2)))


def test_a_dead_rank_ends_the_others():
    with pytest.raises(RankDied) as caught:
        run_ranks(_dies, 2, fresh=True)
    assert "exited with code 7" in caught.value.reports[1].outcome
    assert "raised" in caught.value.reports[0].outcome


@on_ranks(1)
def test_what_is_refused() -> None:
    engine = engine_of(linears(2), 1, 2)
    for call in (engine, engine.backward, engine.step, engine.optimizer.backward):
        with pytest.raises(PipelineError):
            call(torch.zeros(1))
    with pytest.raises(PipelineError, match="no_sync"), engine.no_sync():
        pass
    with torch.no_grad(), pytest.raises(RuntimeError, match="eval_batch"):
        engine.train_batch(iter(items(2, 2)))
    with pytest.raises(NotImplementedError, match="reduce_output"):
        engine.eval_batch(iter(items(2, 2)), reduce_output="max")
    with pytest.raises(RuntimeError, match="num_stages=2"):
        PipelineModule(linears(2), num_stages=2)
    with pytest.raises(RuntimeError, match="num_stages or topology"):
        PipelineModule(linears(2))
