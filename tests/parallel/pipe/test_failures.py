"""No pipeline hangs: whatever goes wrong on one rank ends the step on all of them, in the same words."""

import os
import time

import pytest
import torch

import deepspeed
from deepspeed.errors import PipelineError
from deepspeed.pipe import LayerSpec, PipelineModule
from tests.harness import on_ranks
from tests.harness.errors import RankDied
from tests.harness.pool import run_ranks
from tests.parallel.pipe import support


def _error_of(action):
    started = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        action()
    return str(caught.value), time.monotonic() - started


def _missing_data(world):
    engine = support.engine_of(2, 1, 4)
    copy = engine.grid.data_parallel_id
    count = 3 if engine.is_last_stage() else 4
    error = _error_of(lambda: engine.train_batch(iter(support.items(0, copy, count))))
    without = _error_of(lambda: engine.train_batch(None if engine.is_last_stage() else iter([])))
    if engine.is_first_stage():
        engine.set_train_batch_size(2 * 3)
    number = _error_of(lambda: engine.train_batch(iter(support.items(0, copy, 4))))
    if engine.is_first_stage():
        engine.set_train_batch_size(2 * 4)
    # No weight has changed, so the training continues.
    engine.set_dataiterator(None)
    losses = support.train(engine, 4, 3)
    return error[0], without[0], number[0], losses


def test_missing_data_raises_before_the_step():
    results = run_ranks(_missing_data, 2, 2)
    error, without, number, losses = results[0]
    assert all(result[0] == error and result[1] == without and result[3] == losses for result in results)
    assert error == (
        "train_batch: the data of stage 1 (rank 1) ended after 3 of 4 micro-batches, so micro-batch 3 is missing. "
        "No weight has changed; give the ranks that load data loaders of equal length, or a RepeatingLoader"
    )
    assert "the data of stage 0 (rank 0) ended after 0 of 4" in without
    assert "found 3 on rank 0 and 4 on rank 1" in number
    expected, _ = run_ranks(support.reference, 1, 1, 4)[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-6, atol=1e-6)


class Raises(support.Block):
    """Fails at its third micro-batch, in forward or in backward."""

    def __init__(self, where):
        super().__init__(5)
        self.where, self.calls = where, 0

    def forward(self, value):
        self.calls += 1
        hidden, mask = super().forward(value)
        if self.calls == 3 and self.where == "forward":
            raise ValueError("a bad sample")
        if self.calls == 3:
            hidden.register_hook(self._fail)
        return hidden, mask

    def _fail(self, _gradient):
        raise ValueError("a bad gradient")


def _raises(stages, where):
    layers = support.layers()
    layers[1 if where == "forward" else 4] = LayerSpec(Raises, where)
    engine = support.engine_of(stages, 1, 4, layers=layers)
    error, seconds = _error_of(lambda: support.train(engine, 4, 1))
    assert seconds < 60, f"{seconds} s"
    return error


@pytest.mark.parametrize(("where", "stage", "what"), [("forward", 0, "bad sample"), ("backward", 1, "bad gradient")])
def test_an_exception_reaches_all_ranks(where, stage, what):
    error = run_ranks(_raises, 2, 2, where, fresh=True)
    assert len(set(error)) == 1
    layer = ", layer 1, Raises, input ((2, 6, 7), (2, 6))" if where == "forward" else ""
    assert error[0].startswith(f"train_batch: stage {stage} (rank {stage}), {where} of micro-batch 2{layer}: ")
    assert f"ValueError: a {what.split(' ', 0)[0]}" in error[0]


class Dies(support.Block):
    def forward(self, value):
        os._exit(7)


def _dies(stages):
    layers = support.layers()
    layers[4] = LayerSpec(Dies, 5)
    engine = support.engine_of(stages, 1, 4, layers=layers)
    support.train(engine, 4, 1)


def test_a_dead_rank_ends_the_others():
    with pytest.raises(RankDied) as caught:
        run_ranks(_dies, 2, 2, fresh=True)
    assert "1" in str(caught.value)


@on_ranks(1)
def test_what_is_refused() -> None:
    module = PipelineModule(support.layers(), num_stages=1, loss_fn=support.loss_fn)
    engine, *_ = deepspeed.initialize(model=module, config=support.config(0, 2))
    for call in (engine, engine.backward, engine.step, engine.optimizer.backward):
        with pytest.raises(PipelineError):
            call(torch.zeros(1))
    with pytest.raises(PipelineError, match="no_sync"), engine.no_sync():
        pass
    with torch.no_grad(), pytest.raises(RuntimeError, match="eval_batch"):
        engine.train_batch(iter(support.items(0, 0, 2)))
    with pytest.raises(NotImplementedError, match="reduce_output"):
        engine.eval_batch(iter(support.items(0, 0, 2)), reduce_output="max")
    with pytest.raises(RuntimeError, match="num_stages=2"):
        PipelineModule(support.layers(), num_stages=2)
    with pytest.raises(RuntimeError, match="num_stages or topology"):
        PipelineModule(support.layers())
