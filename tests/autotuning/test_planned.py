"""Which candidates are planned, and by how many ranks."""

from __future__ import annotations

import pytest

from deepspeed.autotuning.candidates import BatchLimits, CandidateSpace
from deepspeed.autotuning.choice import CandidatePlan
from deepspeed.autotuning.planned import CandidatePlanner, ranks_that_plan


@pytest.mark.parametrize(
    ("seconds", "planned"),
    [
        ({8: 1.0, 4: 1.2, 2: 0.9, 1: 1.0}, [8, 4, 2, 1]),  # a smaller one may win
        ({8: 1.0, 4: 1.2, 2: 1.3}, [8, 4, 2]),
        ({8: 1.0, 4: 1.4}, [8, 4]),  # slower by more than the error bar
        ({8: 2.0, 4: 1.0, 2: 1.4}, [8, 4, 2]),
    ],
)
def test_smaller_micro_batches_are_planned_until_they_are_slower(seconds, planned, monkeypatch):
    space = CandidateSpace({"zero_optimization": {"stage": 1}}, {}, BatchLimits(16), 2, None, offloads=False)

    def candidate(self, space, setting, micro):
        return CandidatePlan(f"micro {micro}", {}, fits=True, seconds=seconds[micro])

    monkeypatch.setattr(CandidatePlanner, "candidate", candidate)
    planner = CandidatePlanner.__new__(CandidatePlanner)
    rows = planner.plan_all(space, space.settings(), refine=False)
    assert [row["name"] for row in rows] == [f"micro {micro}" for micro in planned]


@pytest.mark.parametrize(
    ("settings", "seconds", "refine", "ranks"),
    [(4, 0.1, False, 1), (4, 1.0, False, 4), (4, 5.0, False, 4), (16, 1.0, False, 8), (2, 0.5, True, 2)],
)
def test_ranks_plan_where_there_is_enough_to_plan(settings, seconds, refine, ranks):
    assert ranks_that_plan(settings, seconds, 8, refine=refine) == ranks
