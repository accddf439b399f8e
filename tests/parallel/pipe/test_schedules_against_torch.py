"""The schedules beside those of torch.distributed.pipelining: its prover takes ours, its lists are not quicker."""

from types import SimpleNamespace

import pytest
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from deepspeed.parallel.pipe.schedule import TRAIN_SCHEDULES, Action, Kind, Schedule, make_schedule, place_chunks
from deepspeed.parallel.pipe.schedule.simulate import Times, simulate

TIMES = Times(forward=40, backward=80, weight=40)

# Private names of torch, which may change from one release to the next.
NAMES = ("_Action", "_ComputationType", "_add_send_recv", "_simulate_comms_compute")
pytestmark = pytest.mark.skipif(
    not all(hasattr(torch_schedules, name) for name in NAMES), reason="this torch has no prover of schedules"
)


@pytest.mark.parametrize("name", TRAIN_SCHEDULES)
def test_its_prover_finds_ours_live(name):
    for stages, micro_batches in ((1, 2), (2, 1), (3, 7), (4, 8), (5, 3), (6, 12)):
        schedule = make_schedule(name, stages, micro_batches)
        kind = torch_schedules._ComputationType
        lists = {
            stage: [torch_schedules._Action(a.chunk, kind.from_str(a.kind.value), a.micro_batch) for a in actions]
            for stage, actions in enumerate(schedule.actions)
        }
        with_transfers = torch_schedules._add_send_recv(lists, schedule.stage_of.__getitem__, schedule.chunks)
        torch_schedules._simulate_comms_compute(with_transfers, schedule.stage_of.__getitem__, schedule.chunks)


PAIRS = {
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


@pytest.mark.parametrize(("name", "theirs"), PAIRS.items())
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 8), (4, 16)])
def test_its_lists_are_not_quicker(name, theirs, stages, micro_batches):
    ours = make_schedule(name, stages, micro_batches, 2)
    their = _of_torch(theirs, place_chunks(name, stages, 2), stages, micro_batches)
    assert simulate(ours, TIMES).makespan <= simulate(their, TIMES).makespan + 1e-6


def _of_torch(class_name: str, stage_of: tuple[int, ...], stages: int, micro_batches: int) -> Schedule:
    own = [
        SimpleNamespace(
            group_rank=0,
            group_size=stages,
            num_stages=len(stage_of),
            stage_index=chunk,
            is_first=False,
            is_last=False,
            has_backward=True,
            device="cpu",
            submod=nn.Identity(),
        )
        for chunk, stage in enumerate(stage_of)
        if stage == 0
    ]
    made = getattr(torch_schedules, class_name)(own, micro_batches, loss_fn=lambda output, target: output)
    lists = []
    for stage in range(stages):
        flat = []
        for action in made.pipeline_order[stage]:
            for one in (action.sub_actions or (action,)) if action is not None else ():
                flat.append(Action(Kind(one.computation_type.value), one.stage_index, one.microbatch_index))
        lists.append(tuple(flat))
    return Schedule(class_name, micro_batches, stage_of, tuple(lists))
