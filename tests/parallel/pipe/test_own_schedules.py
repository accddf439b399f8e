"""Programs that bring schedules and instructions of their own, or run the published ones; DualPipeV under its name."""

from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.pipe import DualPipeVModule
from deepspeed.runtime.pipe import schedule as published
from deepspeed.runtime.pipe.engine import DualPipeVEngine, PipelineEngine
from tests.harness.pool import run_ranks
from tests.parallel.pipe import support

COUNT = 4


class _Note(published.PipeInstruction):
    """An instruction of the schedule below, defined by the program only."""


class _Annotated(published.TrainSchedule):
    """1F1B in its published form, with a word before each forward."""

    def steps(self) -> Any:
        for step in super().steps():
            result: list[Any] = []
            for instruction in step:
                if isinstance(instruction, published.ForwardPass):
                    result.append(_Note(text=f"buffer {instruction.buffer_id}"))
                result.append(instruction)
            yield result


def _by_itself(stages: int) -> tuple[list[float], list[str], int, str]:
    engine = support.engine_of(stages, 1, COUNT)
    notes: list[str] = []
    backwards = []

    def note(self: Any, text: str) -> None:
        assert self is engine
        notes.append(text)

    def backward(self: Any, **arguments: Any) -> None:
        backwards.append(arguments["buffer_id"])
        PipelineEngine._exec_backward_pass(self, **arguments)

    known = {**PipelineEngine._INSTRUCTION_MAP, _Note: note, published.BackwardPass: backward}
    losses = []
    for step in range(3):
        schedule = _Annotated(COUNT, engine.num_stages, engine.stage_id)
        engine.set_dataiterator(iter(support.items(step, 0, COUNT)))
        if step == 0:
            with pytest.raises(deepspeed.errors.PipelineError, match="schedule: expected instructions.*_Note"):
                engine._exec_schedule(published_only(schedule))
            engine._INSTRUCTION_MAP = known
            engine.set_dataiterator(iter(support.items(step, 0, COUNT)))
        engine._exec_schedule(schedule)
        losses.append(engine.agg_train_loss.item())
    return losses, notes, len(backwards), type(engine).__name__


def published_only(schedule: Any) -> list[list[Any]]:
    """The first word that nobody knows yet."""
    return [[instruction for instruction in step if isinstance(instruction, _Note)] for step in schedule]


def test_a_published_schedule_with_an_instruction_of_its_own():
    expected, _ = run_ranks(support.reference, 1, 1, COUNT)[0]
    for stage, (losses, notes, backwards, _) in enumerate(run_ranks(_by_itself, 2, 2)):
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor([loss for loss, _ in expected]), rtol=2e-6, atol=0
        )
        assert len(notes) == 3 * COUNT == backwards
        assert set(notes) == {"buffer 0", "buffer 1"}, stage


class _HalfNumbered(published.TrainSchedule):
    """Forwards say their micro-batch and not their chunk, backwards the other way round."""

    def steps(self) -> Any:
        forwards = iter(range(COUNT))
        for step in super().steps():
            for instruction in step:
                if isinstance(instruction, published.ForwardPass):
                    instruction.kwargs["micro_batch"] = next(forwards)
                elif isinstance(instruction, published.BackwardPass):
                    instruction.kwargs["chunk"] = self.stage_id
            yield step


def _half_numbered(stages: int) -> list[float]:
    engine = support.engine_of(stages, 1, COUNT)
    losses = []
    for step in range(3):
        engine.set_dataiterator(iter(support.items(step, 0, COUNT)))
        engine._exec_schedule(_HalfNumbered(COUNT, engine.num_stages, engine.stage_id))
        losses.append(engine.agg_train_loss.item())
    return losses


def test_instructions_that_leave_one_of_chunk_and_micro_batch_to_be_counted():
    expected, _ = run_ranks(support.reference, 1, 1, COUNT)[0]
    for losses in run_ranks(_half_numbered, 2, 2):
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor([loss for loss, _ in expected]), rtol=2e-6, atol=0
        )


def _data_parallel() -> list[float]:
    engine = support.engine_of(1, 1, COUNT)
    losses = []
    for step in range(3):
        engine.set_dataiterator(iter(support.items(step, 0, COUNT)))
        engine._exec_schedule(published.DataParallelSchedule(COUNT, 1, 0))
        losses.append(engine.agg_train_loss.item())
    return losses


def test_the_schedule_without_a_pipeline():
    expected, _ = run_ranks(support.reference, 1, 1, COUNT)[0]
    losses = run_ranks(_data_parallel, 1)[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor([loss for loss, _ in expected]), rtol=2e-6, atol=0)


def _dual(stages: int) -> list[tuple[float, float]]:
    torch.manual_seed(3)
    module = DualPipeVModule(support.layers(), num_stages=stages, loss_fn=support.loss_fn)
    assert module.schedule == "dualpipev" and len(module.partitions()) == 2 * stages + 1
    rank = torch.distributed.get_rank()
    assert module.chunks == [rank, 2 * stages - 1 - rank]
    assert module.phase_bounds == [(module.parts[chunk], module.parts[chunk + 1]) for chunk in module.chunks]
    assert [len(funcs) for funcs in module.phase_funcs] == [stop - start for start, stop in module.phase_bounds]
    assert module.active_phase == 0
    module.activate_phase(1)
    assert module.active_phase == 1
    module.activate_phase(0)
    assert [module.stage_owner(layer) for layer in (0, 5)] == [0, 0]
    assert len(module.tied_modules) == (1 if rank == 0 else 0)  # the first rank has both ends
    with pytest.raises(DeepSpeedConfigError, match="its schedule is dualpipev"):
        DualPipeVModule(support.layers(), num_stages=stages, schedule="1f1b")
    engine, *_ = deepspeed.initialize(model=module, config=support.config(1, COUNT))
    assert type(engine) is DualPipeVEngine
    return support.train(engine, COUNT, 3)


def test_dualpipev_under_its_name():
    expected, _ = run_ranks(support.reference, 1, 1, COUNT)[0]
    for found in run_ranks(_dual, 2, 2):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-6, atol=1e-6)
