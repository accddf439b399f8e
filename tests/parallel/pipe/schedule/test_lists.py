"""Every schedule, proven by the simulator: live, complete, in order, as quick and as lean as published."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from deepspeed.parallel.pipe.schedule import (
    TRAIN_SCHEDULES,
    Action,
    Kind,
    Schedule,
    StageSchedule,
    make_inference,
    make_schedule,
    place_chunks,
)
from deepspeed.parallel.pipe.schedule import lists as instr
from deepspeed.parallel.pipe.schedule.simulate import ScheduleError, Times, simulate

# Milliseconds per stage and micro-batch, as in the benchmark.
TIMES = Times(forward=40, backward=80, weight=40)
CHUNKS = {"interleaved": (2, 3), "zb-h1": (None, 2, 3)}


@cache
def every_schedule(most_stages: int = 6, most_micro_batches: int = 12) -> tuple[Schedule, ...]:
    sizes = [(p, m) for p in range(1, most_stages + 1) for m in range(1, most_micro_batches + 1)]
    named = [(name, chunks) for name in TRAIN_SCHEDULES for chunks in CHUNKS.get(name, (None,))]
    return tuple(make_schedule(name, p, m, chunks) for p, m in sizes for name, chunks in named)


def test_every_schedule_has_its_lists():
    assert tuple(instr._LISTS) == TRAIN_SCHEDULES


def test_every_schedule_is_live_complete_and_in_order():
    for schedule in every_schedule():
        simulate(schedule, TIMES)


def test_every_evaluation_is_live_complete_and_in_order():
    for schedule in every_schedule():
        evaluation = make_inference(schedule.stage_of, schedule.micro_batches)
        assert simulate(evaluation, TIMES).held == (1,) * schedule.stages
    assert make_inference((0, 1), 0).actions == ((), ())


def test_bounded_channels_are_enough():
    """Two messages in flight per channel; with chunks in a loop a group, which waits there for its next chunk."""
    for schedule in every_schedule(5, 9):
        groups = max(1, schedule.micro_batches // schedule.stages)
        largest = -(-schedule.micro_batches // groups) + in_two_groups(schedule)
        is_looped = schedule.name in ("interleaved", "zb-h1") and schedule.chunks > schedule.stages
        simulate(schedule, TIMES, channel_size=max(2, largest) if is_looped else 2)


def in_two_groups(schedule: Schedule) -> bool:
    """Interleaved, with a larger group first in forward and last in backward."""
    p, m = schedule.stages, schedule.micro_batches
    return schedule.name == "interleaved" and p > 3 and 2 * p <= m <= 2 * p + 1


def most_held(schedule: Schedule, stage: int) -> float:
    """What the papers allow, in micro-batches of a whole stage."""
    p, m = schedule.stages, schedule.micro_batches
    v = schedule.chunks // p
    group = -(-m // max(1, m // p))
    if in_two_groups(schedule):
        return (p - 1 - stage + (stage < p - 1) + (v - 1) * (p + 1) + 1) / v
    return {
        "gpipe": m,
        "1f1b": min(p - stage + (stage < p - 1), m),  # one more than published
        "interleaved": min((2 * (p - 1 - stage) + (v - 1) * group + 1) / v, m),
        "zb-h1": min(p - 1 - stage + (v - 1) * group + 1 + stage, v * m) / v,
        "zbv": min(p, m),
        "dualpipev": min(p + 0.5, m),
    }[schedule.name]


def test_activations_held():
    for schedule in every_schedule():
        held = simulate(schedule).held
        for stage, count in enumerate(held):
            most = most_held(schedule, stage) * len(schedule.chunks_of(stage))
            assert count <= most, (schedule.name, schedule.stages, schedule.micro_batches, stage, count, most)
            if schedule.name in ("gpipe", "1f1b", "interleaved", "zb-h1"):
                assert count == most


def idle(schedule: Schedule, times: Times) -> float:
    """Idle time per stage from the papers, where stages start together (so that filling counts, also for ZBV)."""
    p, v = schedule.stages, schedule.chunks // schedule.stages
    both = times.forward + times.backward
    return {
        "gpipe": (p - 1) * both,
        "1f1b": (p - 1) * both,
        "interleaved": (p - 1) * both / v,
        "zb-h1": (p - 1) * (both - 2 * times.weight) / v,
        "zbv": (p - 1) * times.forward / 2,
        "dualpipev": (p - 1) * times.forward / 2,
    }[schedule.name]


def test_the_step_takes_the_time_of_the_papers():
    """From m = p on, ZBV and DualPipeV from 2 p; the V shapes where F = B / 2 = W."""
    for schedule in every_schedule():
        p, m = schedule.stages, schedule.micro_batches
        if m < (2 * p if schedule.name in ("zbv", "dualpipev") else p):
            continue
        expected = m * (TIMES.forward + TIMES.backward) + idle(schedule, TIMES)
        assert simulate(schedule, TIMES).makespan == pytest.approx(expected), (schedule.name, p, m)


def test_interleaved_in_two_groups_waits_for_no_round():
    """What a transfer adds to a step: filling and draining, not the p transfers until a group comes round, each way."""
    for p, v in itertools.product((4, 6, 8), (2, 3)):
        for m, rounds in ((2 * p - 1, 0), (2 * p, 0), (2 * p + 1, 0), (3 * p, p * (v - 1))):
            schedule = make_schedule("interleaved", p, m, v)
            each = [simulate(schedule, Times(20, 40, 20, transfer)).makespan for transfer in (0.0, 0.1)]
            assert (each[1] - each[0]) / 0.1 == pytest.approx(2 * (p - 1) + 2 * rounds), (p, v, m)
    # They also keep less than stages that are further ahead of each other.
    assert simulate(make_schedule("interleaved", 4, 8)).held[0] == 10
    assert simulate(make_schedule("interleaved", 4, 12)).held[0] == 11


@pytest.mark.parametrize("times", [Times(30, 50, 20), Times(10, 35, 15), Times(50, 60, 30)], ids=str)
def test_other_times(times):
    for name in ("gpipe", "1f1b", "interleaved"):
        schedule = make_schedule(name, 4, 8)
        expected = 8 * (times.forward + times.backward) + idle(schedule, times)
        long_backward = name == "interleaved" and times.backward > 3 * times.forward
        assert simulate(schedule, times).makespan == pytest.approx(expected, rel=0.01 if long_backward else 1e-6)
    # Split backwards never lose to 1F1B.
    for name in ("zb-h1", "zbv", "dualpipev"):
        assert (
            simulate(make_schedule(name, 4, 8), times).makespan < simulate(make_schedule("1f1b", 4, 8), times).makespan
        )


@pytest.mark.parametrize(
    ("name", "most"),
    [("1f1b", 1320), ("gpipe", 1320), ("interleaved", 1140), ("zb-h1", 1158), ("zbv", 1143), ("dualpipev", 1147)],
)
def test_the_times_to_reach(name, most):
    """Four stages, eight micro-batches: the measured times of other implementations, which ours must not exceed."""
    assert simulate(make_schedule(name, 4, 8), TIMES).makespan <= most


def test_transfers_delay_only_what_waits_for_them():
    slow = replace(TIMES, transfer=10)
    # Filling and draining goes through p - 1 transfers each way; in between they hide.
    for name in ("gpipe", "1f1b"):
        assert simulate(make_schedule(name, 4, 8), slow).makespan == 1320 + 6 * 10
    assert simulate(make_schedule("1f1b", 1, 8), slow).makespan == 8 * 120
    # The two chunks at the bottom of a V lie on one stage: nothing is transferred between them.
    assert simulate(make_inference((0, 0), 1), slow).makespan == 40


def test_instructions_as_text():
    """Loads come once per micro-batch where data is read; each chunk's passes are marked once as first and last."""
    for schedule in every_schedule(4, 6):
        for stage in range(schedule.stages):
            steps = [*StageSchedule(schedule, stage)]
            flat = [instruction for step in steps for instruction in step]
            counts = Counter(type(instruction) for instruction in flat)
            reads = bool({0, schedule.chunks - 1} & {*schedule.chunks_of(stage)})
            assert counts[instr.LoadMicroBatch] == reads * schedule.micro_batches
            assert [type(i) for i in steps[-1]] == [instr.ReduceTiedGrads, instr.ReduceGrads, instr.OptimizerStep]
            for chunk in schedule.chunks_of(stage):
                forwards = [i for i in flat if isinstance(i, instr.ForwardPass) and i.chunk == chunk]
                weights = [
                    i for i in flat if isinstance(i, (instr.BackwardPass, instr.BackwardWeight)) and i.chunk == chunk
                ]
                for passes in (forwards, weights):
                    assert [i.is_first for i in passes] == [True] + [False] * (schedule.micro_batches - 1)
                    assert [i.is_last for i in passes] == [False] * (schedule.micro_batches - 1) + [True]


def test_a_buffer_holds_one_micro_batch_at_a_time():
    for schedule in every_schedule(4, 6):
        for stage in range(schedule.stages):
            result_here = StageSchedule(schedule, stage)
            used: dict[int, tuple[int, int]] = {}
            for instruction in (i for step in result_here for i in step):
                if isinstance(instruction, instr.ForwardPass):
                    assert instruction.buffer_id not in used
                    assert 0 <= instruction.buffer_id < result_here.num_pipe_buffers()
                    used[instruction.buffer_id] = (instruction.chunk, instruction.micro_batch)
                elif isinstance(instruction, (instr.BackwardPass, instr.BackwardInput, instr.BackwardWeight)):
                    assert used[instruction.buffer_id] == (instruction.chunk, instruction.micro_batch)
                    if not isinstance(instruction, instr.BackwardInput):
                        del used[instruction.buffer_id]
            assert not used


@pytest.mark.parametrize(
    ("name", "stages", "chunks", "message"),
    [
        ("1f1d", 2, None, f"schedule='1f1d' is not known; choose one of {', '.join(map(repr, TRAIN_SCHEDULES))}"),
        ("1f1b", 2, 2, "schedule='1f1b' has one chunk per stage and num_chunks is 2"),
        ("interleaved", 2, 1, "num_chunks=1 .*expected 2 chunks per stage or more"),
        ("zb-h1", 2, 0, "schedule='zb-h1' has one chunk per stage and num_chunks is 0"),
        ("zbv", 2, 3, "lays two chunks per stage in a V, so num_chunks=3 is not possible"),
        ("dualpipev", 2, 1, "lays two chunks per stage in a V, so num_chunks=1 is not possible"),
        ("gpipe", 0, None, "a pipeline of 0 stages is not possible"),
    ],
)
def test_impossible_choices_are_refused(name, stages, chunks, message):
    with pytest.raises(ValueError, match=message):
        place_chunks(name, stages, chunks)


def test_a_step_without_micro_batches_is_refused():
    with pytest.raises(ValueError, match="a step of 0 micro-batches"):
        make_schedule("1f1b", 2, 0)


def test_where_chunks_lie():
    assert place_chunks("interleaved", 3) == (0, 1, 2, 0, 1, 2)
    assert place_chunks("zbv", 3) == place_chunks("dualpipev", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert make_schedule("zbv", 3, 4).chunks_of(0) == (0, 5)


# What the simulator must find.

F, B = Kind.FORWARD, Kind.BACKWARD


def _two(first: list[Action], second: list[Action], micro_batches: int = 2) -> Schedule:
    return Schedule("made", micro_batches, (0, 1), (tuple(first), tuple(second)))


def _chunk(chunk: int, *pairs: tuple[Kind, int]) -> list[Action]:
    return [Action(kind, chunk, i) for kind, i in pairs]


def test_a_cycle_of_waits_is_found():
    wrong = _two(_chunk(0, (F, 0), (B, 0), (F, 1), (B, 1)), _chunk(1, (F, 0), (F, 1), (B, 0), (B, 1)))
    with pytest.raises(ScheduleError, match=r"hangs: stage 0 waits for ever: RecvGrad\(.*micro_batch=0.*stage 1 waits"):
        simulate(wrong)


def test_full_channels_that_block_each_other_are_found():
    """Stage 0 does its first chunk to the end before it takes what stage 1 sends back."""
    many = [(F, i) for i in range(4)]
    wrong = Schedule("made", 4, (0, 1, 0), ((*_chunk(0, *many), *_chunk(2, *many)), tuple(_chunk(1, *many))))
    simulate(wrong)
    simulate(wrong, channel_size=2)
    with pytest.raises(ScheduleError, match="for which there is no room"):
        simulate(wrong, channel_size=1)


def test_messages_in_another_order_are_found():
    in_order = [(F, 0), (F, 1)]
    lists = (tuple(_chunk(0, *in_order)), tuple(_chunk(1, *reversed(in_order))), tuple(_chunk(2, *in_order)))
    with pytest.raises(ScheduleError, match="stage 1 does .* and would receive what chunk 0 has sent of micro-batch 0"):
        simulate(Schedule("made", 2, (0, 1, 2), lists))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (_chunk(1, (F, 0), (B, 0), (F, 1)), r"stage 1 does \['F'\] on chunk 1, micro-batch 1"),
        (_chunk(1, (F, 0), (B, 0), (B, 1), (F, 1)), r"stage 1 does \['B', 'F'\] on chunk 1, micro-batch 1"),
        (_chunk(1, (F, 0), (B, 0), (F, 1), (B, 1), (B, 1)), r"stage 1 does \['F', 'B', 'B'\]"),
        (_chunk(1, (F, 0), (B, 0), (F, 1), (B, 1), (F, 2)), r"computes what is not its own: \[\(1, 2\)\]"),
        ([*_chunk(1, (F, 0), (B, 0), (F, 1), (B, 1)), *_chunk(0, (F, 0), (B, 0))], "computes what is not its own"),
    ],
)
def test_lost_repeated_and_misplaced_computations_are_found(second, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(_two(_chunk(0, (F, 0), (F, 1), (B, 0), (B, 1)), second))


def test_data_out_of_order_is_found():
    actions = _chunk(0, (F, 1), (F, 0), (B, 0), (B, 1))
    with pytest.raises(ScheduleError, match="when the data gives item 0"):
        simulate(Schedule("made", 2, (0,), (tuple(actions),)))
