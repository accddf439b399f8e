"""The schedules that other programs know, in the forms in which they read them."""

from __future__ import annotations

import pytest

from deepspeed.parallel.pipe.schedule import instructions as told
from deepspeed.parallel.pipe.schedule.published import DataParallelSchedule, InferenceSchedule, TrainSchedule


def _kinds(step):
    return [type(instruction) for instruction in step]


def test_an_instruction_carries_its_arguments():
    instruction = told.ForwardPass(3, micro_batch=5)
    assert (instruction.name, instruction.kwargs) == ("ForwardPass", {"buffer_id": 3, "micro_batch": 5})
    assert (instruction.buffer_id, instruction.micro_batch) == (3, 5)
    assert repr(instruction) == "ForwardPass(buffer_id=3, micro_batch=5)"
    assert instruction == told.ForwardPass(buffer_id=3, micro_batch=5)
    assert instruction != told.BackwardPass(buffer_id=3, micro_batch=5) and instruction != told.ForwardPass(4)
    assert len({told.OptimizerStep(), told.OptimizerStep(), told.ReduceGrads()}) == 2
    with pytest.raises(AttributeError, match="ForwardPass has no argument 'peer'"):
        _ = instruction.peer


def test_one_stage_and_one_micro_batch():
    first, second = TrainSchedule(micro_batches=1, stages=1, stage_id=0)
    assert _kinds(first) == [told.LoadMicroBatch, told.ForwardPass]
    assert _kinds(second) == [told.BackwardPass, told.ReduceTiedGrads, told.ReduceGrads, told.OptimizerStep]


@pytest.mark.parametrize("micro_batches", [1, 3, 8, 10])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_training_steps_lie_where_they_are_published(micro_batches, stages):
    for stage in range(stages):
        schedule = TrainSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage)
        steps = list(schedule)
        assert len(steps) == 2 * (micro_batches + stages - 1)
        assert schedule.num_pipe_buffers() == max(2, min(stages - stage, micro_batches))
        for i in range(micro_batches):
            forward, backward = steps[2 * i + stage], steps[2 * i + 2 * stages - 1 - stage]
            assert _kinds(forward).count(told.ForwardPass) == _kinds(backward).count(told.BackwardPass) == 1
            assert forward[-1].buffer_id == i % schedule.num_pipe_buffers()
        assert sum(_kinds(step).count(told.ForwardPass) for step in steps) == micro_batches
        counts = {kind: sum(_kinds(step).count(kind) for step in steps) for kind in (told.SendGrad, told.RecvGrad)}
        assert counts == {
            told.SendGrad: micro_batches * (stage > 0),
            told.RecvGrad: micro_batches * (stage < stages - 1),
        }


def test_order_inside_a_training_step():
    steps = list(TrainSchedule(micro_batches=4, stages=3, stage_id=1))
    assert _kinds(steps[5]) == [told.SendGrad, told.RecvActivation, told.ForwardPass]
    assert _kinds(steps[4]) == [told.RecvGrad, told.SendActivation, told.BackwardPass]
    assert _kinds(steps[-1])[-3:] == [told.ReduceTiedGrads, told.ReduceGrads, told.OptimizerStep]


@pytest.mark.parametrize("stage", range(3))
def test_inference(stage):
    schedule = InferenceSchedule(micro_batches=4, stages=3, stage_id=stage)
    steps = list(schedule)
    assert (len(steps), schedule.num_pipe_buffers()) == (6, 2)
    kinds = [kind for step in steps for kind in _kinds(step)]
    assert kinds.count(told.ForwardPass) == 4
    assert kinds.count(told.SendActivation) == (4 if stage < 2 else 0)
    assert kinds.count(told.RecvActivation) == (4 if stage > 0 else 0)
    assert kinds.count(told.LoadMicroBatch) == (0 if stage == 1 else 4)
    if stage == 1:
        assert _kinds(steps[2]) == [told.RecvActivation, told.SendActivation, told.ForwardPass]


def test_data_parallel():
    schedule = DataParallelSchedule(micro_batches=3, stages=1, stage_id=0)
    steps = list(schedule)
    assert schedule.num_pipe_buffers() == 1 and len(steps) == 3
    assert _kinds(steps[0]) == [told.LoadMicroBatch, told.ForwardPass, told.BackwardPass]
    assert _kinds(steps[-1])[3:] == [told.ReduceGrads, told.OptimizerStep]


def test_properties():
    schedule = TrainSchedule(micro_batches=4, stages=3, stage_id=1)
    assert (schedule.stage, schedule.num_stages, schedule.num_micro_batches) == (1, 3, 4)
    assert (schedule.prev_stage, schedule.next_stage) == (0, 2)
    assert not schedule.is_first_stage and not schedule.is_last_stage
    with pytest.raises(ValueError, match="a stage_id from 0 to below stages"):
        TrainSchedule(micro_batches=4, stages=3, stage_id=3)
