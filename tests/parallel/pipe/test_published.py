"""The schedules that other programs know, in the forms in which they read them."""

import pytest

from deepspeed.parallel.pipe.schedule import lists as instr
from deepspeed.parallel.pipe.schedule.published import DataParallelSchedule, InferenceSchedule, TrainSchedule


def _kinds(step):
    return [type(instruction) for instruction in step]


def test_an_instruction_carries_its_arguments():
    instruction = instr.ForwardPass(3, micro_batch=5)
    assert (instruction.name, instruction.kwargs) == ("ForwardPass", {"buffer_id": 3, "micro_batch": 5})
    assert (instruction.buffer_id, instruction.micro_batch) == (3, 5)
    assert repr(instruction) == "ForwardPass(buffer_id=3, micro_batch=5)"
    assert instruction == instr.ForwardPass(buffer_id=3, micro_batch=5)
    assert instruction != instr.BackwardPass(buffer_id=3, micro_batch=5) and instruction != instr.ForwardPass(4)
    assert len({instr.OptimizerStep(), instr.OptimizerStep(), instr.ReduceGrads()}) == 2
    with pytest.raises(AttributeError, match="ForwardPass has no argument 'peer'"):
        _ = instruction.peer


def test_one_stage_and_one_micro_batch():
    first, second = TrainSchedule(micro_batches=1, stages=1, stage_id=0)
    assert _kinds(first) == [instr.LoadMicroBatch, instr.ForwardPass]
    assert _kinds(second) == [instr.BackwardPass, instr.ReduceTiedGrads, instr.ReduceGrads, instr.OptimizerStep]


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
            assert _kinds(forward).count(instr.ForwardPass) == _kinds(backward).count(instr.BackwardPass) == 1
            assert forward[-1].buffer_id == i % schedule.num_pipe_buffers()
        assert sum(_kinds(step).count(instr.ForwardPass) for step in steps) == micro_batches
        counts = {kind: sum(_kinds(step).count(kind) for step in steps) for kind in (instr.SendGrad, instr.RecvGrad)}
        assert counts == {
            instr.SendGrad: micro_batches * (stage > 0),
            instr.RecvGrad: micro_batches * (stage < stages - 1),
        }


def test_order_inside_a_training_step():
    steps = list(TrainSchedule(micro_batches=4, stages=3, stage_id=1))
    assert _kinds(steps[5]) == [instr.SendGrad, instr.RecvActivation, instr.ForwardPass]
    assert _kinds(steps[4]) == [instr.RecvGrad, instr.SendActivation, instr.BackwardPass]
    assert _kinds(steps[-1])[-3:] == [instr.ReduceTiedGrads, instr.ReduceGrads, instr.OptimizerStep]


@pytest.mark.parametrize("stage", range(3))
def test_inference(stage):
    schedule = InferenceSchedule(micro_batches=4, stages=3, stage_id=stage)
    steps = list(schedule)
    assert (len(steps), schedule.num_pipe_buffers()) == (6, 2)
    kinds = [kind for step in steps for kind in _kinds(step)]
    assert kinds.count(instr.ForwardPass) == 4
    assert kinds.count(instr.SendActivation) == (4 if stage < 2 else 0)
    assert kinds.count(instr.RecvActivation) == (4 if stage > 0 else 0)
    assert kinds.count(instr.LoadMicroBatch) == (0 if stage == 1 else 4)
    if stage == 1:
        assert _kinds(steps[2]) == [instr.RecvActivation, instr.SendActivation, instr.ForwardPass]


def test_data_parallel():
    schedule = DataParallelSchedule(micro_batches=3, stages=1, stage_id=0)
    steps = list(schedule)
    assert schedule.num_pipe_buffers() == 1 and len(steps) == 3
    assert _kinds(steps[0]) == [instr.LoadMicroBatch, instr.ForwardPass, instr.BackwardPass]
    assert _kinds(steps[-1])[3:] == [instr.ReduceGrads, instr.OptimizerStep]


def test_properties():
    schedule = TrainSchedule(micro_batches=4, stages=3, stage_id=1)
    assert (schedule.stage, schedule.num_stages, schedule.num_micro_batches) == (1, 3, 4)
    assert (schedule.prev_stage, schedule.next_stage) == (0, 2)
    assert not schedule.is_first_stage and not schedule.is_last_stage
    with pytest.raises(ValueError, match="a stage_id from 0 to below stages"):
        TrainSchedule(micro_batches=4, stages=3, stage_id=3)
